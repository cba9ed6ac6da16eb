"""verl's main_ppo.py on the tiny task: its imports changed, its calls as they are.

python examples/tiny/make.py
python examples/library/main_ppo.py trainer.total_training_steps=10
"""

from pathlib import Path

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from mindspeed_rlxf.api import (
    ActorRolloutRefWorker,
    CriticWorker,
    NVMegatronRayWorkerGroup,
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    RewardManager,
    RewardModelWorker,
    Role,
)


def main():
    config = OmegaConf.load(Path(__file__).with_name("ppo.yaml"))
    config = OmegaConf.merge(config, OmegaConf.from_cli())
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    ray_worker_group_cls = RayWorkerGroup
    if config.actor_rollout_ref.actor.strategy == "megatron":
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
        ray_worker_group_cls = NVMegatronRayWorkerGroup

    role_worker_mapping = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }
    global_pool_id = "global_pool"
    resource_pool_spec = {
        global_pool_id: [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
    }
    mapping = dict.fromkeys(role_worker_mapping, global_pool_id)
    if config.reward_model.enable:
        role_worker_mapping[Role.RewardModel] = RewardModelWorker
        mapping[Role.RewardModel] = global_pool_id

    trainer = RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=ResourcePoolManager(resource_pool_spec, mapping),
        ray_worker_group_cls=ray_worker_group_cls,
        reward_fn=RewardManager(tokenizer=tokenizer, num_examine=0),
        val_reward_fn=RewardManager(tokenizer=tokenizer, num_examine=1),
    )
    trainer.init_workers()
    trainer.fit()


if __name__ == "__main__":
    main()
