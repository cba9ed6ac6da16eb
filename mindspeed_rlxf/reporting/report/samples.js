// Browse samples: filters and a list, one sample in full, a validation prompt over iterations.

const PAGE = 100;

function scoreText(sample) {
  return num(sample.s, 3);
}

function plainText(text) {
  return h('div', { class: 'text', dir: 'auto', tabindex: '0' }, text === '' ? '(empty)' : text);
}

/** One sample in full. */
function sampleView(sample, scales) {
  const colored = sample.t && sample.num && Object.keys(sample.num).length, missing = sample.k === 'validation' ? 'Numbers per token are of training samples.' : 'No numbers per token are known of this sample.';
  const facts = [['Iteration', sample.i], ['Sample', sample.id], ['From', sample.k], ['Data source', sample.d], ['Score', scoreText(sample)], ['Tokens', sample.n], ['Expected', sample.gt ?? (sample.k === 'training' ? 'not logged for training samples' : null)], ['Answer taken', sample.a],
    ...Object.entries(sample.parts).map(([name, value]) => [`Part ${name}`, typeof value === 'number' ? num(value) : String(value)])];
  return h('div', {}, h('h3', {}, 'Prompt'), plainText(sample.p), h('h3', {}, 'Response'), colored ? tokenView(sample, scales) : [plainText(sample.r), h('p', { class: 'small soft' }, missing)],
    h('table', {}, h('tbody', {}, facts.filter(([, value]) => value !== undefined && value !== null).map(([name, value]) => h('tr', {}, h('th', { scope: 'row' }, name), h('td', { dir: 'auto' }, String(value)))))));
}

/** A list of samples that the arrow keys move in. onPick gets the sample. */
function sampleList(samples, onPick) {
  const list = h('div', { class: 'list', role: 'listbox', tabindex: '0', 'aria-label': 'Samples' });
  let at = 0, shown = 0;
  const more = h('button', { type: 'button', on: { click: () => extend() } });
  function extend() {
    const next = samples.slice(shown, shown + PAGE);
    next.forEach((sample, offset) => {
      const i = shown + offset;
      list.append(h('div', { role: 'option', id: `sample-${i}`, 'aria-selected': 'false', on: { click: () => pick(i) } }, h('span', {}, String(sample.i)), h('span', {}, sample.k.slice(0, 5)), h('span', {}, scoreText(sample)), h('span', { dir: 'auto' }, `${sample.p} \u2192 ${sample.r}`)));
    });
    shown += next.length;
    more.textContent = `Show more (${samples.length - shown} left)`;
    more.hidden = shown >= samples.length;
  }
  function pick(i) {
    if (i < 0 || i >= samples.length) return;
    while (i >= shown) extend();
    list.children[at]?.setAttribute('aria-selected', 'false');
    at = i;
    list.children[at].setAttribute('aria-selected', 'true');
    list.setAttribute('aria-activedescendant', `sample-${at}`);
    list.children[at].scrollIntoView({ block: 'nearest' });
    onPick(samples[at]);
  }
  list.addEventListener('keydown', (event) => {
    const next = { ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1, Home: 0, End: samples.length - 1, PageDown: Math.min(at + 10, samples.length - 1), PageUp: Math.max(at - 10, 0) }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    pick(next);
  });
  extend();
  const heads = h('div', { class: 'heads', 'aria-hidden': 'true' }, ['Iteration', 'From', 'Score', 'Prompt \u2192 response'].map((head) => h('span', {}, head)));
  return { element: h('div', {}, heads, list, more), first: () => { if (samples.length) { const before = document.documentElement.scrollTop; pick(0); document.documentElement.scrollTop = before; } } };
}

/** Filters over samples. onChange gets those that pass. */
function sampleFilters(samples, onChange) {
  const none = { kind: '', source: '', from: '', to: '', low: '', high: '', text: '' };
  const keep = state.filters = state.filters || { ...none, order: 'iteration' };
  const sources = [...new Set(samples.map((sample) => sample.d).filter(Boolean))].sort();
  const field = (name, props) => { const input = h('input', { value: keep[name], 'data-filter': name, ...props, on: { input: () => { keep[name] = input.value; apply(); } } }); return input; };
  const choice = (name, choices, label) => { const made = selectOf(choices, keep[name], (value) => { keep[name] = value; apply(); }, label); made.dataset.filter = name; return made; };
  function apply() {
    const text = keep.text.toLowerCase(), limit = (name, otherwise) => (keep[name] === '' ? otherwise : Number(keep[name]));
    const [from, to, low, high] = [limit('from', -Infinity), limit('to', Infinity), limit('low', null), limit('high', null)];
    const found = samples.filter((s) => (!keep.kind || s.k === keep.kind) && (!keep.source || s.d === keep.source) && s.i >= from && s.i <= to
      && (low === null || (typeof s.s === 'number' && s.s >= low)) && (high === null || (typeof s.s === 'number' && s.s <= high)) && (!text || `${s.p}\n${s.r}`.toLowerCase().includes(text)));
    const by = { iteration: (a, b) => a.i - b.i || a.id - b.id, newest: (a, b) => b.i - a.i || a.id - b.id, low: (a, b) => (a.s ?? Infinity) - (b.s ?? Infinity), high: (a, b) => (b.s ?? -Infinity) - (a.s ?? -Infinity), long: (a, b) => b.n - a.n }[keep.order];
    const swapped = (low !== null && high !== null && low > high && 'The lowest score is above the highest.') || (from > to && 'The first iteration is after the last.') || '';
    clear.disabled = Object.keys(none).every((name) => keep[name] === '');
    onChange(found.sort(by), swapped);
  }
  const clear = h('button', { type: 'button', id: 'clear-filters', on: { click: () => {
    Object.assign(keep, none);
    element.querySelectorAll('[data-filter]').forEach((control) => { control.value = keep[control.dataset.filter]; });
    apply();
  } } }, 'Clear filters');
  const element = h('div', { class: 'controls', role: 'search', 'aria-label': 'Filters of samples' },
    labelled('From', choice('kind', [['', 'all'], ['training', 'training'], ['validation', 'validation']], 'Training or validation')),
    sources.length > 1 ? labelled('Source', choice('source', [['', 'all'], ...sources.map((s) => [s, s])], 'Data source')) : null,
    labelled('Iterations from', field('from', { type: 'number', 'aria-label': 'First iteration' })), labelled('to', field('to', { type: 'number', 'aria-label': 'Last iteration' })),
    labelled('Score from', field('low', { type: 'number', step: 'any', 'aria-label': 'Lowest score' })), labelled('to', field('high', { type: 'number', step: 'any', 'aria-label': 'Highest score' })),
    labelled('Search', field('text', { type: 'search', 'aria-label': 'Search prompts and responses' })),
    labelled('Order', choice('order', [['iteration', 'by iteration'], ['newest', 'newest first'], ['low', 'lowest score first'], ['high', 'highest score first'], ['long', 'longest first']], 'Order of samples')), clear);
  return { apply, element };
}

/** Validation prompts as [{pid, prompt, truth, by: Map(iteration -> samples), first, last}]. */
function promptsOf(samples) {
  const prompts = new Map();
  for (const sample of samples) {
    if (sample.k !== 'validation' || typeof sample.i !== 'number') continue;
    if (!prompts.has(sample.pid)) prompts.set(sample.pid, { pid: sample.pid, prompt: sample.p, truth: sample.gt, by: new Map() });
    const by = prompts.get(sample.pid).by;
    if (!by.has(sample.i)) by.set(sample.i, []);
    by.get(sample.i).push(sample);
  }
  const mean = (group) => group.reduce((sum, sample) => sum + (sample.s ?? 0), 0) / group.length;
  for (const prompt of prompts.values()) {
    prompt.iterations = [...prompt.by.keys()].sort((a, b) => a - b);
    [prompt.first, prompt.last] = [prompt.iterations[0], prompt.iterations[prompt.iterations.length - 1]].map((i) => mean(prompt.by.get(i)));
  }
  return [...prompts.values()].sort((a, b) => a.pid - b.pid);
}

/** Follow one validation prompt over the iterations, its responses side by side. */
function promptCard(samples, some) {
  const prompts = promptsOf(samples), card = h('div', { class: 'card', id: 'prompts' }, h('h3', {}, 'A validation prompt over iterations'));
  if (some && prompts.length) card.append(h('p', { class: 'soft small' }, `${prompts.length} logged prompts, a part of the validation set. ${some}`));
  if (!prompts.length) { card.append(h('p', { class: 'soft' }, 'The report has no samples of a validation.')); return card; }
  const groups = { better: ['now better', (p) => p.last > p.first], worse: ['now worse', (p) => p.last < p.first], same: ['unchanged', (p) => p.last === p.first], all: ['all logged', () => true] };
  const count = (test) => prompts.filter(test).length, chips = h('div', { class: 'chips' }), columns = h('div', { class: 'columns', tabindex: '0', role: 'group' }), head = h('div');
  const select = selectOf(Object.entries(groups).map(([key, [text, test]]) => [key, `${text} (${count(test)})`]), '', (value) => list(value), 'Which prompts');
  function list(key) {
    state.promptGroup = select.value = key;
    const found = prompts.filter(groups[key][1]);
    chips.replaceChildren(...found.slice(0, 200).map((prompt) => h('button', { type: 'button', 'data-pid': String(prompt.pid), dir: 'auto', on: { click: () => show(prompt) } }, prompt.prompt.slice(-80) || '(empty)')), ...(found.length > 200 ? [h('span', { class: 'soft' }, `and ${found.length - 200} more`)] : []));
    if (found.length) show(found.find((prompt) => prompt.pid === state.promptShown) || found[0]); else { head.replaceChildren(h('p', { class: 'soft' }, 'None.')); columns.replaceChildren(); }
  }
  function show(prompt) {
    state.promptShown = prompt.pid;
    chips.querySelectorAll('button').forEach((button) => button.setAttribute('aria-pressed', String(button.dataset.pid === String(prompt.pid))));
    head.replaceChildren(plainText(prompt.prompt), prompt.truth !== undefined ? h('p', {}, 'Expected: ', h('bdi', {}, prompt.truth)) : '');
    columns.setAttribute('aria-label', `Responses to the prompt in ${prompt.iterations.length} validations`);
    columns.replaceChildren(...prompt.iterations.map((iteration) => h('div', {}, h('h3', {}, iteration ? `iteration ${iteration}` : 'before training'), prompt.by.get(iteration).map((sample) => [
      h('p', { class: 'small' }, 'score ', h('b', {}, scoreText(sample))), plainText(sample.r)]))));
  }
  card.append(h('div', { class: 'controls' }, labelled('Prompts that are', select)), chips, head, columns);
  list(state.promptGroup || (count(groups.better[1]) ? 'better' : 'all'));
  return card;
}

function samplesSection(runs, loaded) {
  const body = h('div'), status = h('p', { role: 'status', class: 'soft' }, 'Reading the samples ...');
  const section = h('section', { id: 'samples', 'aria-labelledby': 'samples-h' }, h('h2', { id: 'samples-h' }, 'Samples'), status, body);
  loaded.then((all) => {
    const show = (name) => {
      const at = Math.max(runs.findIndex((run) => run.name === name), 0), { samples, seen, every } = all[at];
      state.samplesOf = runs[at].name;
      const left = h('div'), right = h('div', { class: 'card', id: 'sample' }), count = h('p', { class: 'small soft', role: 'status', id: 'sample-count' });
      const scales = tokenScales(samples), logged = runs[at].config['logging.samples'];
      const some = logged === undefined || logged === 'all' ? '' : `The run logs ${logged} responses of each iteration and of each validation (logging.samples); scores are means over all of them.`;
      const filters = sampleFilters(samples, (found, swapped) => {
        count.textContent = `${found.length} of ${samples.length} samples`;
        const list = sampleList(found, (sample) => right.replaceChildren(sampleView(sample, scales)));
        left.replaceChildren(count, list.element);
        right.replaceChildren(h('p', { class: 'soft' }, found.length ? '' : swapped || `No logged sample passes the filters. ${some && `${some} Others may pass.`}`));
        list.first();
      });
      status.textContent = seen > samples.length ? `${samples.length} of the ${seen} samples that the run wrote, evenly chosen. mindspeed-rlxf report --samples sets their number.` : '';
      if (every > 1) status.textContent += ` To keep the report small, one in ${every} has numbers per token.`;
      body.replaceChildren(promptCard(samples, some), filters.element, h('div', { class: 'split' }, h('div', { class: 'card' }, left), right));
      filters.apply();
    };
    if (runs.length > 1) section.insertBefore(h('div', { class: 'controls' }, labelled('Run', selectOf(runs.map((run) => [run.name, run.name]), state.samplesOf || runs[0].name, show, 'Run whose samples are shown'))), status);
    if (!all.some((each) => each.samples.length)) { status.textContent = 'The run wrote no samples (logging.samples).'; return; }
    show(state.samplesOf || runs[0].name);
  }).catch((error) => { status.textContent = `The samples cannot be shown: ${error.message}`; status.className = 'error'; });
  return section;
}
