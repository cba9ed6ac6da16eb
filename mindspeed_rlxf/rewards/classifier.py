"""Scores from any Hugging Face sequence classifier that transformers supports.

With the policy's tokenizer it reads the very ids of prompt and response. With another one it reads
a chat through its own template, and other prompts as one text with the response.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf import device
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.data.decoding import RewardTexts, decode_without_special, special_ids
from mindspeed_rlxf.data.tokenizer import SpecialTokens, load_tokenizer, vocabulary_hash
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.tensor_checks import find_quantized

KEY = "reward.load"
HEAD = "ForSequenceClassification"
WANTED = "a Hugging Face folder with a sequence classifier of one label"

Message = dict[str, Any]
"""A chat's message: role, content and what else its template reads."""


class Classifier:
    """A classifier on this rank's device. Each rank scores its own samples."""

    def __init__(self, folder: str, tokenizer: Any, batch_size: int, bf16: bool) -> None:
        """Load a local folder's model; raise ValueError if weights are missing.

        `tokenizer` is used if the folder has none; either is set to truncate on the left.
        `batch_size` is the number of texts per forward pass; without `bf16` it computes in float32.
        """
        from transformers import AutoModelForSequenceClassification

        files = "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"
        has_tokenizer = any((Path(folder) / name).exists() for name in files)
        self._tokenizer = load_tokenizer(folder, KEY) if has_tokenizer else tokenizer
        self._policy_tokenizer = tokenizer
        self._shares_ids = vocabulary_hash(self._tokenizer) == vocabulary_hash(tokenizer)
        self._policy_texts = RewardTexts(tokenizer)
        self._special = SpecialTokens(self._tokenizer)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # others are pickles, which may run code
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{KEY}={folder} lacks weights ({missing[0]}, ...); give {WANTED}")
        self._device = device.current_device()
        # Versions of transformers differ in the name of the argument for the precision.
        dtype = torch.bfloat16 if bf16 else torch.float32
        self._model: Any = model.to(self._device, dtype).eval()
        # Decoder models find the last token of a text by the padding id of their config.
        config = self._model.config
        self._pad = 0
        for pad in (
            config.pad_token_id,
            self._tokenizer.pad_token_id,
            self._tokenizer.eos_token_id,
        ):
            if pad is not None:
                self._pad = pad
                break
        config.pad_token_id = self._pad
        self._batch_size = batch_size
        self._limit = self._find_limit(has_tokenizer)
        self._tokenizer.truncation_side = "left"

    def _find_limit(self, has_tokenizer: bool) -> int | None:
        """Return the most tokens per text, None = unlimited.

        RoBERTa-like models number positions after the padding id, and leave those before it unused.
        """
        positions = getattr(self._model.config, "max_position_embeddings", None)
        for name, module in self._model.named_modules():
            padding = getattr(module, "padding_idx", None)
            are_positions = name.rpartition(".")[2] == "position_embeddings"
            if positions and are_positions and padding is not None:
                positions -= padding + 1
        limits = [positions, self._tokenizer.model_max_length if has_tokenizer else None]
        # Some models have -1, and transformers gives a tokenizer without a limit 10**30.
        return min((limit for limit in limits if limit and 0 < limit < 10**20), default=None)

    def score_rollouts(self, rollouts: Rollouts) -> list[float]:
        """Return the logit of each prompt with its response.

        The end of a response that has ended is read too: its EOS, or what the classifier's template
        and tokenizer have in place of it. Sequences over the model's limit lose their beginning.
        """
        rows = zip(
            rollouts.prompt_tokens(),
            rollouts.response_tokens(),
            rollouts.has_eos.tolist(),
            rollouts.messages,
            strict=True,
        )
        return self.score_tokens([self._row_ids(*row) for row in rows])

    def score(self, texts: Sequence[str]) -> list[float]:
        """Return each text's logit.

        Texts over the model's limit lose their beginning, but keep the tokenizer's leading special
        tokens, because BERT computes its score from the first token.
        """
        return self.score_tokens([self._text_ids(text, False) for text in texts])

    def _row_ids(
        self, prompt: list[int], response: list[int], has_ended: bool, messages: list[Message]
    ) -> list[int]:
        tokenizer, policy = self._tokenizer, self._policy_tokenizer
        has_same_template = tokenizer.chat_template in (None, policy.chat_template)
        if self._shares_ids and (not messages or has_same_template):
            return self._cut(prompt + response)
        answer = self._policy_texts.response(response, has_ended)
        if messages and tokenizer.chat_template:
            return self._cut(self._chat_ids(messages, answer, has_ended))
        text = decode_without_special(policy, prompt) + answer
        return self._text_ids(text, has_ended)

    def _chat_ids(self, messages: list[Message], answer: str, has_ended: bool) -> list[int]:
        """Return a chat in the classifier's template, closed only if the response has ended."""
        hidden = self._special.hide([*messages, {"role": "assistant", "content": answer}])
        text = str(self._tokenizer.apply_chat_template(hidden, tokenize=False))
        content = hidden[-1]["content"].strip()
        position = text.rfind(content)
        end = len(text) if position < 0 else position + len(content)
        closing = self._special.token_ids(text[end:])
        if not has_ended:
            return self._special.token_ids(text[:end])
        is_closed = not set(closing).isdisjoint(special_ids(self._tokenizer))
        eos = self._tokenizer.eos_token_id
        return self._special.token_ids(text) + ([] if is_closed or eos is None else [eos])

    def _text_ids(self, text: str, has_ended: bool) -> list[int]:
        eos = self._tokenizer.eos_token_id
        limit = self._limit
        truncation = {"truncation": True, "max_length": limit} if limit else {}
        ids: list[int] = self._tokenizer(text, **truncation)["input_ids"]
        if not has_ended or eos is None or ids[-1:] == [eos]:
            return ids
        if limit and len(ids) == limit:
            ids = self._tokenizer(text, truncation=True, max_length=limit - 1)["input_ids"]
        return [*ids, eos]

    def _cut(self, ids: list[int]) -> list[int]:
        if not self._limit or len(ids) <= self._limit:
            return ids
        start = ids[:1] if ids[0] == self._tokenizer.bos_token_id else []
        return start + ids[len(ids) - (self._limit - len(start)) :]

    @torch.no_grad()
    def score_tokens(self, token_ids: Sequence[list[int]]) -> list[float]:
        """Return the logit of each sequence of ids, none of them over the model's limit."""
        ids = [sequence or [self._pad] for sequence in token_ids]
        scores = [0.0] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # texts of like length together
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            batch = pad_sequence([torch.tensor(ids[i]) for i in rows], True, self._pad)
            lengths = torch.tensor([len(ids[i]) for i in rows])
            mask = (torch.arange(batch.size(1))[None, :] < lengths[:, None]).long()
            logits = self._model(
                input_ids=batch.to(self._device), attention_mask=mask.to(self._device)
            ).logits
            for row, score in zip(rows, logits.float().squeeze(-1).tolist(), strict=True):
                scores[row] = score
        return scores


def check_classifier(folder: str | None) -> list[Problem]:
    """Return the reasons why the folder's model cannot score; reads the headers of its weights."""
    if folder is None:
        return [Problem(KEY, f"must name {WANTED}", remedy=f"set {KEY}=FOLDER")]
    try:
        config = read_hf_config(Path(folder), WANTED)
    except ValueError as error:
        return [Problem(KEY, str(error), folder, colon=True)]
    rules = []  # broken ones
    names = config.get("architectures") or []
    if not any(str(name).endswith(HEAD) for name in names):
        rules.append(f"config.json must name a model ...{HEAD}, it names {json.dumps(names)}")
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1:
        rules.append(f"the model must have one label, it has {num_labels}")
    if config.get("auto_map"):
        rules.append("the model must be one of transformers, its config.json names code of its own")
    if not any(Path(folder).glob("*.safetensors")):
        rules.append("weights must be safetensors, there are none")
    if rules:
        return [Problem(KEY, rule, folder, f"give {WANTED}", colon=True) for rule in rules]
    try:
        weights = open_hf_folder(folder)
    except ValueError as error:
        return [Problem(KEY, str(error), folder, colon=True)]
    quantized = find_quantized(folder, weights, (n for n in weights if n.endswith("weight")))
    return [Problem(KEY, quantized, folder, colon=True)] if quantized else []
