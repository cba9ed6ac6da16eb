// The report: answers, curves, time, samples, configuration. Texts of a run become text nodes, never markup.

const html = document.documentElement, LIVE = Boolean(html.dataset.live), COLORS = 11, PAGE = 100, HEIGHT = 205;
/** What the user has chosen; it outlives a redraw of a live page. */
const state = { smoothing: 9, log: false, range: false, zoom: null, hidden: new Set(), listeners: new Set(), open: new Set(['Score and reward', 'Validation']) };
const redraw = () => state.listeners.forEach((draw) => draw());

// Elements and numbers
/** Make an element. `on` has listeners, `style` properties; null, undefined and false are left out. */
function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [kind, run] of Object.entries(value)) made.addEventListener(kind, run);
    else if (name === 'style') Object.assign(made.style, value);
    else if (name === 'value') made.value = value;
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}
const soft = (...children) => h('p', { class: 'soft' }, ...children);
const note = (...children) => h('p', { class: 'soft small' }, ...children);
const labelled = (text, control) => h('label', {}, text, control);
const button = (props, click, ...children) => h('button', { type: 'button', ...props, on: { click } }, ...children);
const swatch = (color) => h('span', { class: 'swatch', style: { background: `var(--${color})` } });
const runSwatch = (color) => swatch(`c${color % COLORS}`);
const card = (props, title, ...children) => h('div', { class: 'card', ...props }, h('h3', {}, title), ...children);
const section = (id, title, ...children) => h('section', { id, 'aria-labelledby': `${id}-h` }, h('h2', { id: `${id}-h`, class: id === 'summary' && 'hidden' }, title), ...children);
/** A text that may break after a dot, a slash or an underscore, not inside of a word. */
const breakable = (text) => h('span', {}, text.split(/(?<=[._/])/).flatMap((part) => [part, h('wbr')]));

function selectOf(choices, chosen, onChange, label) {
  return h('select', { 'aria-label': label, on: { change: (event) => onChange(event.target.value) } }, choices.map(([value, text]) => h('option', { value, selected: value === chosen }, text)));
}

function checkbox(label, key) {
  return h('label', {}, h('input', { type: 'checkbox', checked: state[key], on: { change: (event) => { state[key] = event.target.checked; redraw(); } } }), label);
}

function table(names, rows, caption) {
  const cell = (value) => h('td', { dir: 'auto' }, value instanceof Node ? value : String(value ?? ''));
  return h('div', { class: 'scroll' }, h('table', {}, h('caption', { class: 'hidden' }, caption),
    h('thead', {}, h('tr', {}, names.map((name) => h('th', { scope: 'col' }, name)))), h('tbody', {}, rows.map((row) => h('tr', {}, row.map(cell))))));
}

/** Show one run at a time, chosen by its name. */
function oneOf(runs, key, label, draw) {
  const body = h('div'), names = runs.map((run) => run.name);
  const show = (name) => { const at = Math.max(names.indexOf(name), 0); state[key] = names[at]; body.replaceChildren(...draw(at)); };
  show(state[key]);
  return [runs.length > 1 ? h('div', { class: 'controls' }, labelled('Run', selectOf(names.map((name) => [name, name]), state[key], show, label))) : null, body];
}

/** Format a number: four digits, null as an absent value. */
function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return 'none';
  return value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

function seconds(s) {
  const all = Math.round(s), minutes = Math.floor(all / 60);
  if (s < 60) return `${num(s, 3)} s`;
  return minutes < 60 ? `${minutes} min ${all % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const known = (values) => values.filter((value) => value !== null && value !== undefined);

/** The place among `count` to which a key leads from `at`; undefined for other keys. */
function placeOf(event, at, count, [back, forth] = ['ArrowLeft', 'ArrowRight']) {
  const steps = { [back]: -1, [forth]: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in steps)) return undefined;
  event.preventDefault();
  return Math.min(Math.max(at + steps[event.key], 0), count - 1);
}

async function load(name, page) {
  if (typeof DecompressionStream === 'undefined') throw new Error('this browser cannot decompress gzip; one from 2023 or later can');
  const packed = Uint8Array.from(atob(page.getElementById(`data-${name}`).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'))).json();
}

/** Run `draw` when the element first comes near the screen, and after each change of the state. */
function drawWhenSeen(element, draw) {
  new IntersectionObserver((entries, watcher) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    const again = () => { if (element.isConnected) draw(); else state.listeners.delete(again); };
    state.listeners.add(again);
    draw();
  }, { rootMargin: '300px' }).observe(element);
}

// Charts over iterations, drawn by uPlot: drag or + and - zoom all charts, the arrow keys read values
const css = (name) => getComputedStyle(html).getPropertyValue(name).trim();
const tinted = (color, part) => `color-mix(in srgb, ${color} ${part}%, transparent)`;

/** Add a plot. xs: all iterations; describe() returns {series, data, bands} of uPlot for the present state, {log, low} of the axis, or {empty}; read(i) says values. */
function addPlot(parent, { xs, label, describe, read, values, zooms }) {
  const keys = zooms ? 'Arrow keys read values, + and - zoom, 0 shows all.' : 'Arrow keys read the iterations.';
  const box = h('div', { class: 'plot', role: 'img', tabindex: '0', 'aria-label': `${label} ${keys}` }), readout = h('output', { 'aria-live': 'polite' });
  const last = Math.max(xs[xs.length - 1], xs[0] + 1), shown = () => (zooms && state.zoom) || [xs[0], last];
  const setZoom = (a, b) => { const zoom = [Math.max(a, xs[0]), Math.min(b, last)]; state.zoom = zoom[0] === xs[0] && zoom[1] === last ? null : zoom; redraw(); };
  let plot = null, at = null;
  parent.append(box, readout);

  function draw() {
    const { series, data, bands, log, low, empty } = describe(shown()), stroke = css('--soft'), grid = { stroke: css('--line'), width: 1 };
    plot?.destroy();
    plot = box.plot = null;
    box.replaceChildren(...(empty ? [h('p', { class: 'soft empty' }, empty)] : []));
    if (empty) return;
    const axis = { stroke, grid, ticks: { show: false }, font: '11px system-ui, sans-serif' };
    const room = (u, a, b) => {
      const by = a === b ? Math.abs(a) * 0.1 : log ? 0 : (b - a) * 0.05;
      return a === null || (a === 0 && b === 0) ? [0, 1] : [low ?? a - by, b + by];
    };
    plot = box.plot = new uPlot({
      width: Math.max(box.clientWidth, 200), height: HEIGHT, legend: { show: false }, bands, padding: [8, 14, 0, 0],
      cursor: { y: false, drag: { x: Boolean(zooms), y: false, setScale: false }, points: { size: 7 } },
      scales: { x: { time: false, range: () => (zooms ? shown() : [xs[0] - 0.5, last + 0.5]) }, y: { distr: log ? 3 : 1, range: room } },
      axes: [{ ...axis, grid: { show: false }, label: 'iteration', labelSize: 16, labelFont: axis.font, size: 24, space: 60, incrs: [1, 10, 100, 1000, 10000].flatMap((n) => [n, 2 * n, 5 * n]) },
        { ...axis, size: 54, space: 34, values: (u, all) => all.map(values || ((v) => (v === null ? '' : num(v, 5)))) }],
      hooks: {
        setCursor: [(u) => { if ((u.cursor.idx ?? null) !== null || document.activeElement !== box) say(u.cursor.idx); }],
        setSelect: [(u) => { const [a, b] = [u.select.left, u.select.left + u.select.width].map((x) => u.posToVal(x, 'x')); if (b - a >= 1) setZoom(a, b); }],
      },
      series: [{}, ...series],
    }, data, box);
  }

  const say = (i) => { at = i ?? null; readout.textContent = at !== null ? read(at) : box.matches(':focus-visible') ? keys : ''; };

  box.addEventListener('focus', () => say(at));
  box.addEventListener('blur', () => say(null));
  if (zooms) box.addEventListener('dblclick', () => setZoom(-Infinity, Infinity));
  box.addEventListener('keydown', (event) => {
    const [x0, x1] = shown(), from = xs.findIndex((x) => x >= x0), count = xs.filter((x) => x >= x0 && x <= x1).length;
    const next = plot && placeOf(event, at === null ? (event.key === 'ArrowLeft' ? count : -1) : at - from, count);
    const middle = at === null ? (x0 + x1) / 2 : xs[at], factor = { '+': 0.25, '=': 0.25, '-': 1, 0: Infinity, Escape: Infinity }[event.key];
    if (Number.isInteger(next)) { plot.setCursor({ left: plot.valToPos(xs[from + next], 'x'), top: 1 }); say(from + next); }
    else if (zooms && factor && !event.ctrlKey && !event.metaKey) { event.preventDefault(); setZoom(middle - (x1 - x0) * factor, middle + (x1 - x0) * factor); }
  });
  drawWhenSeen(parent, draw);
}

/** Means of `count` neighbours around each value, fewer at the ends; null stays a gap. */
function smooth(ys, count) {
  const side = (count - 1) / 2;
  return ys.map((y, i) => (y === null ? null : mean(known(ys.slice(Math.max(i - side, 0), i + side + 1)))));
}

/** Describe a line in a sentence for those who do not see it. */
function sayLine({ label, x, y }) {
  const points = y.flatMap((value, i) => (value === null ? [] : [[x[i], value]])), ys = points.map((point) => point[1]);
  if (!ys.length) return `${label}: no values`;
  const [first, last] = [points[0], points[points.length - 1]];
  return `${label}: ${num(first[1])} at iteration ${first[0]}, ${num(last[1])} at iteration ${last[0]}, lowest ${num(Math.min(...ys))}, highest ${num(Math.max(...ys))}`;
}

/** Draw a metric of all runs, with its meaning and its healthy range as dashed lines. Ranks are dots: they have no mean. */
function chartOf({ name, title, low, high, same }, runs) {
  const about = runs.map((run) => run.about[name]).find(Boolean) || {}, dots = name.startsWith('slowest_rank/');
  const lines = runs.flatMap((run, color) => {
    const curve = run.curves[name], side = (other) => { const found = run.curves[other], at = new Map(found?.x.map((x, i) => [x, found.y[i]])); return found && curve.x.map((x) => at.get(x) ?? null); };
    return curve ? [{ label: run.name, color: `--c${color % COLORS}`, ...curve, low: side(low), high: side(high) }] : [];
  });
  const linear = h('p', { class: 'soft note linear', hidden: true }, 'linear: some values are 0 or negative');
  const made = h('div', { class: 'card chart' }, h('h3', {}, breakable(title), about.unit ? h('span', { class: 'soft' }, ` (${about.unit})`) : null),
    about.meaning ? h('p', { class: 'soft note' }, about.meaning) : null, same.length ? h('p', { class: 'soft note' }, `Same values: ${same.join(', ')}`) : null,
    about.range ? h('p', { class: 'soft note', title: about.remedy && `Otherwise: ${about.remedy}` }, h('span', { class: 'dash' }), `healthy ${about.range}`) : null, linear);
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b), index = new Map(lines.map((line) => [line, new Map(line.x.map((x, i) => [x, i]))]));
  const visible = () => lines.filter((line) => !state.hidden.has(line.label));

  function describe([x0, x1]) {
    const series = [], data = [xs], bands = [], seen = visible().flatMap((line) => line.y.filter((y, i) => y !== null && line.x[i] >= x0 && line.x[i] <= x1));
    if (!seen.length) return { empty: !visible().length ? 'no run is shown' : state.zoom ? `no value in iterations ${Math.ceil(x0)} to ${Math.floor(x1)}` : 'no finite values' };
    const log = state.log && seen.every((y) => y > 0);
    const add = (line, ys, settings) => { data.push(xs.map((x) => ys[index.get(line).get(x)])); series.push({ points: { show: false }, ...settings }); };
    for (const line of visible()) {
      const stroke = css(line.color), points = { show: dots || line.x.length <= 40, size: 5, fill: stroke };
      const average = line.y.length > 30 && state.smoothing > 1 && !dots ? smooth(line.y, state.smoothing) : null;
      if (state.range && line.low && line.high) {
        for (const side of [line.high, line.low]) add(line, side, { width: 0 });
        bands.push({ series: [series.length - 1, series.length], fill: tinted(stroke, 14) });
      }
      if (average) add(line, line.y, { stroke: tinted(stroke, 45), width: 0.9, points });
      add(line, average || line.y, { label: line.label, stroke, width: dots ? 0 : 1.8, paths: dots ? () => null : undefined, ...(average ? {} : { points }) });
    }
    for (const limit of known(about.healthy || [])) {
      data.push(xs.map(() => limit));
      series.push({ stroke: css('--good'), width: 1, dash: [6, 4], points: { show: false }, auto: false });
    }
    linear.hidden = log || !state.log;
    return { series, data, bands, log };
  }

  const read = (i) => `iteration ${xs[i]}: ${visible().filter((line) => line.x.includes(xs[i])).map((line) => {
    const at = line.x.indexOf(xs[i]), band = state.range && line.low && line.high && line.low[at] !== null ? ` (${num(line.low[at])} to ${num(line.high[at])})` : '';
    return `${lines.length > 1 ? `${line.label} ` : ''}${num(line.y[at])}${band}`;
  }).join(', ')}`;
  addPlot(made, { xs, label: `${title}. ${lines.map(sayLine).join('. ')}.`, describe, read, zooms: true, values: dots ? (v) => (Number.isInteger(v) ? String(v) : '') : null });
  return made;
}

// Curves: families of metrics, the curves of all runs in each
const FAMILIES = [
  ['Score and reward', /^(critic\/score|critic\/rewards|reward\/)/], ['Validation', /^val\//], ['Training by data source', /^train\//],
  ['KL and log-probs', /(^critic\/kl|ppo_kl|kl_loss|log_prob_gap|is_weight)/], ['Lengths', /^(response_length|prompt_length)/],
  ['Entropy', /entropy/], ['Losses', /(loss|dpo_)/], ['Clip fractions', /clipfrac/], ['Gradient norms', /grad_norm/], ['Learning rates', /\/lr$/],
  ['Advantages, returns, values', /^critic\/(advantages|returns|values|vpred|explained)/], ['Throughput', /^(throughput|flops|mfu)/],
  ['Memory', /^memory\//], ['Timing', /^(timing|idle|skew|slowest_rank)/], ['Other', /./],
];
const KEY_CHARTS = [/^critic\/score\/mean/, /^val\/.*score$/, /^critic\/kl$/, /^actor\/entropy$/, /^response_length\/mean/, /^timing\/all$/];

/** Metrics of all runs as [{name, title, low, high, same}]: mean, max and min of one thing are one chart, equal curves too. */
function chartsOf(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort(), first = new Map();
  const charts = names.flatMap((name) => {
    const base = name.replace(/\/(mean|max|min)$/, ''), whole = base !== name && ['mean', 'max', 'min'].every((end) => names.includes(`${base}/${end}`));
    if (!whole) return [{ name, title: name, same: [] }];
    return name.endsWith('/mean') ? [{ name, title: `${base}, mean`, low: `${base}/min`, high: `${base}/max`, same: [] }] : [];
  });
  const rank = (chart) => (chart.low ? 0 : chart.name.endsWith('/score') ? 1 : 2);
  return [...charts].sort((a, b) => rank(a) - rank(b)).filter((chart) => {
    const curves = runs.map((run) => run.curves[chart.name]), text = JSON.stringify(curves), before = first.get(text);
    if (new Set(curves.flatMap((curve) => curve?.y || [])).size <= 2) return true; // constants are no copies of each other
    if (!before) first.set(text, chart);
    if (before && !chart.low) before.same.push(chart.name);
    return !before || chart.low;
  }).sort((a, b) => (a.name < b.name ? -1 : 1));
}

function curveControls(runs) {
  const smoothing = h('input', { type: 'range', min: '1', max: '61', step: '2', value: state.smoothing, 'aria-label': 'Smoothing, points of a mean', on: { input: () => { state.smoothing = Number(smoothing.value); redraw(); } } });
  const smoothed = h('output', { class: 'soft small', id: 'smoothing' }), zoomed = h('span', { class: 'soft small', role: 'status' });
  const reset = button({ id: 'reset-zoom' }, () => { state.zoom = null; redraw(); }, 'Show all iterations');
  const chips = runs.map((run, color) => [run.name, button({}, () => { if (!state.hidden.delete(run.name)) state.hidden.add(run.name); redraw(); }, runSwatch(color), run.name)]);
  const say = () => {
    smoothed.textContent = state.smoothing > 1 ? `thick: mean of ${state.smoothing} neighbours; thin: each point` : 'none';
    zoomed.textContent = state.zoom ? `iterations ${Math.ceil(state.zoom[0])} to ${Math.floor(state.zoom[1])}` : 'drag over a chart to zoom';
    reset.disabled = !state.zoom;
    chips.forEach(([name, chip]) => chip.setAttribute('aria-pressed', String(!state.hidden.has(name))));
  };
  state.listeners.add(say);
  say();
  return [runs.length > 1 ? h('div', { class: 'chips', role: 'group', 'aria-label': 'Runs shown' }, chips.map(([, chip]) => chip)) : null,
    h('div', { class: 'controls' }, labelled('Smoothing', smoothing), smoothed, checkbox('Logarithmic', 'log'), checkbox('Smallest to largest', 'range'), reset, zoomed)];
}

function curvesSection(runs, charts) {
  const body = h('div'), search = h('input', { type: 'search', id: 'metric-search', placeholder: 'part of a name', 'aria-label': 'Find a metric', on: { input: show } });
  function show() {
    const wanted = search.value.trim().toLowerCase(), left = new Set(charts.filter((chart) => [chart.name, ...chart.same].some((name) => name.toLowerCase().includes(wanted))));
    const none = left.size ? [] : [soft('No metric has this in its name.')];
    body.replaceChildren(...none, ...FAMILIES.flatMap(([name, test]) => {
      const found = [...left].filter((chart) => test.test(chart.name) && left.delete(chart)), grid = h('div', { class: 'grid' });
      const details = h('details', { open: Boolean(wanted) || state.open.has(name), on: { toggle: () => { // also once it is made open
        if (!wanted) state.open[details.open ? 'add' : 'delete'](name);
        if (details.open && !grid.children.length) grid.append(...found.map((chart) => chartOf(chart, runs)));
      } } }, h('summary', {}, name, h('span', { class: 'soft small' }, ` ${found.length}`)), grid);
      return found.length ? [details] : [];
    }));
  }
  show();
  return section('curves', 'Curves', h('div', { class: 'controls' }, labelled('Find (/)', search)), body);
}

/** Phase -> number of its colour. */
const PHASES = { gen: 0, sync: 10, reward: 3, old_log_prob: 7, ref: 5, values: 4, adv: 9, update_critic: 2, update_actor: 1, val: 8, save: 6 };
const colorOf = (phase) => `c${PHASES[phase]}`;

/** The seconds of each phase of an iteration, stacked: the sum of all is drawn first, those of fewer over it. */
function phaseCards(run) {
  const xs = run.curves['timing/all']?.x;
  if (!xs) return [soft('No iteration has its times.')];
  const phases = Object.keys(PHASES).flatMap((phase) => {
    const curve = run.curves[`timing/${phase}`], at = new Map(curve?.x.map((x, i) => [x, curve.y[i]])), ys = xs.map((x) => at.get(x) || 0), some = ys.filter((y) => y > 0);
    return some.length ? [{ phase, ys, mean: mean(some), count: some.length, meaning: run.about[`timing/${phase}`]?.meaning }] : [];
  });
  let sums = xs.map(() => 0);
  const stacked = phases.map(({ phase, ys }) => { sums = sums.map((sum, i) => sum + ys[i]); return { phase, sums }; }).reverse();
  const describe = () => ({ low: 0, data: [xs, ...stacked.map((each) => each.sums)], series: stacked.map(({ phase }) => ({ label: phase, width: 0, fill: css(`--${colorOf(phase)}`), points: { show: false }, paths: uPlot.paths.bars({ size: [0.9, 60] }) })) });
  const read = (i) => `iteration ${xs[i]}: ${phases.filter(({ ys }) => ys[i] > 0).map(({ phase, ys }) => `${phase} ${num(ys[i], 3)}`).join(', ')} s`;
  const chart = card({ class: 'card chart', id: 'phases' }, 'Phases of each iteration, seconds');
  addPlot(chart, { xs, label: `Seconds of each phase by iteration. Means: ${phases.map((each) => `${each.phase} ${num(each.mean, 3)} s`).join(', ')}.`, describe, read, values: (v) => `${num(v, 3)} s` });
  chart.append(note('val and save are stacked on top; timing/all leaves them out. A phase lasts as long as its slowest rank. Phases of roles on different devices overlap, so that a bar may be higher than the iteration was long. The work of each rank is in timeline/, for ui.perfetto.dev.'));
  return [card({ id: 'time-legend' }, 'Phases: mean seconds of the iterations that have them',
    h('ul', { class: 'legend' }, phases.map((each) => h('li', { title: each.meaning }, swatch(colorOf(each.phase)), `${each.phase} `, h('span', { class: 'soft' }, `${num(each.mean, 3)} s${each.count < xs.length ? ` in ${each.count} of ${xs.length}` : ''}`))))), chart];
}

// Samples: filters and a list, one sample in full with its tokens
const NUMBERS = { advantage: 'Advantage', kl: 'KL', value: 'Value' };
const KL_NOTE = 'The KL of a token is the log of its probability under the policy over that under the reference: it may be negative; only its mean over many tokens is not.';
const plainText = (text) => h('div', { class: 'text', dir: 'auto', tabindex: '0' }, text === '' ? '(empty)' : text);
const GIVEN_NOTE = 'Grey: given to the policy, not sampled and not trained.';
/** The response of a sample; in a conversation what the policy was given is grey. */
const responseText = (sample) => sample.c ? [h('div', { class: 'text', dir: 'auto', tabindex: '0' }, sample.c.map(([isTurn, text]) => h('span', { class: isTurn ? '' : 'given' }, text))), note(GIVEN_NOTE)] : [plainText(sample.r)];
const scoreText = (sample) => num(sample.s, 3);

/** Show the tokens of a sample that has numbers. scales: kind -> full colour, the same for all samples */
function tokenView(sample, scales) {
  const kinds = Object.keys(NUMBERS).filter((kind) => sample.num[kind]), pieces = []; // texts of tokens that make one character together
  sample.t.forEach((text, i) => { if (text !== '' || i === sample.t.length - 1) pieces.push({ text, from: pieces.length ? pieces[pieces.length - 1].to + 1 : 0, to: i }); });
  const box = h('div', { class: 'text', dir: 'auto', tabindex: '0', role: 'group' }), readout = h('output', { 'aria-live': 'polite', class: 'small soft' }), scaleText = h('span', { class: 'small soft' }), about = note();
  const numbers = (kind, { from, to }) => sample.num[kind].slice(from, to + 1);
  let at = -1;
  function say(i) {
    const piece = pieces[at = i];
    box.querySelectorAll('.here').forEach((token) => token.classList.remove('here'));
    box.children[i].classList.add('here');
    box.children[i].scrollIntoView({ block: 'nearest' });
    readout.textContent = `token ${piece.from + 1}${piece.to > piece.from ? ` to ${piece.to + 1}` : ''} of ${sample.n}, ${JSON.stringify(piece.text)}: ${kinds.map((kind) => `${NUMBERS[kind]} ${numbers(kind, piece).map((v) => num(v)).join(' and ')}`).join(', ')}`;
  }
  function draw(kind) {
    const [up, down, above, below] = kind === 'advantage' ? ['up', 'down', 'green', 'red'] : ['above', 'below', 'blue', 'orange'];
    state.tokenKind = kind;
    buttons.forEach((each, i) => each.setAttribute('aria-pressed', String(kinds[i] === kind)));
    box.setAttribute('aria-label', `Response, ${sample.n} tokens coloured by ${NUMBERS[kind]}. Arrow keys read the tokens.`);
    box.replaceChildren(...pieces.map((piece, i) => {
      if (sample.u && !sample.u.some(([first, end]) => piece.from >= first && piece.from < end)) return h('span', { class: 'tok given', on: { pointerenter: () => say(i) } }, piece.text);
      const value = mean(known(numbers(kind, piece))), depth = scales[kind] && Math.min(Math.abs(value) / scales[kind], 1);
      return h('span', { class: 'tok', style: { background: value === null || !depth ? '' : `rgba(var(--${value >= 0 ? up : down}), calc(${depth.toFixed(3)} * var(--depth)))` }, on: { pointerenter: () => say(i) } }, piece.text);
    }));
    scaleText.textContent = `${above} above 0, ${below} below; full colour from ${num(scales[kind], 3)}, the size that 95% of the run's tokens do not exceed`;
    about.textContent = kind === 'kl' && sample.num.kl.some((v) => v < 0) ? KL_NOTE : '';
    if (at >= 0) say(at);
  }
  box.addEventListener('focus', () => { if (at < 0) readout.textContent = 'Arrow keys read the tokens.'; });
  box.addEventListener('keydown', (event) => { const next = placeOf(event, at, pieces.length); if (next !== undefined) say(next); });
  const buttons = kinds.map((kind) => button({}, () => draw(kind), NUMBERS[kind]));
  draw(kinds.includes(state.tokenKind) ? state.tokenKind : kinds[0]);
  return [h('div', { class: 'chips', role: 'group', 'aria-label': 'Colour of the tokens' }, buttons, scaleText), box, readout, about, ...(sample.u ? [note(GIVEN_NOTE)] : [])];
}

function sampleView(sample, scales) {
  const colored = sample.t && sample.num && Object.keys(sample.num).length, missing = sample.k === 'validation' ? 'Numbers per token are of training samples.' : 'No numbers per token are known of this sample.';
  const facts = [['Iteration', sample.i], ['Sample', sample.id], ['From', sample.k], ['Data source', sample.d], ['Score', scoreText(sample)], ['Tokens', sample.n], ['Turns', sample.u?.length], ['Not trained', sample.f], ['Expected', sample.gt ?? (sample.k === 'training' ? 'not logged' : null)], ['Answer taken', sample.a],
    ...Object.entries(sample.parts).map(([name, value]) => [`Part ${name}`, typeof value === 'number' ? num(value) : String(value)]),
    ...Object.entries(sample.x ?? {}).map(([name, value]) => [`Column ${name}`, value])];
  return [h('h3', {}, 'Prompt'), plainText(sample.p), h('h3', {}, 'Response'), colored ? tokenView(sample, scales) : [...responseText(sample), note(missing)],
    h('table', {}, h('tbody', {}, facts.filter(([, value]) => known([value]).length).map(([name, value]) => h('tr', {}, h('th', { scope: 'row' }, name), h('td', { dir: 'auto' }, String(value))))))].flat();
}

/** A list of samples that the arrow keys move in. onPick gets the sample. */
function sampleList(samples, onPick) {
  const list = h('div', { class: 'list', role: 'listbox', tabindex: '0', 'aria-label': 'Samples' }), more = button({}, extend);
  let at = 0;
  function extend() {
    const shown = list.children.length;
    list.append(...samples.slice(shown, shown + PAGE).map((sample, offset) => h('div', { role: 'option', id: `sample-${shown + offset}`, 'aria-selected': 'false', on: { click: () => pick(shown + offset) } },
      [String(sample.i), sample.k.slice(0, 5), scoreText(sample)].map((text) => h('span', {}, text)), h('span', { dir: 'auto' }, `${sample.p} \u2192 ${sample.r}`))));
    more.textContent = `Show more (${samples.length - list.children.length} left)`;
    more.hidden = list.children.length >= samples.length;
  }
  function pick(i, scroll = true) {
    while (i >= list.children.length) extend();
    list.children[at].setAttribute('aria-selected', 'false');
    list.children[at = i].setAttribute('aria-selected', 'true');
    list.setAttribute('aria-activedescendant', `sample-${at}`);
    if (scroll) list.children[at].scrollIntoView({ block: 'nearest' });
    onPick(samples[at]);
  }
  list.addEventListener('keydown', (event) => {
    const next = placeOf(event, at, samples.length, 'jk'.includes(event.key) ? ['k', 'j'] : ['ArrowUp', 'ArrowDown']);
    if (next >= 0) pick(next);
  });
  extend();
  if (samples.length) pick(0, false);
  return [h('div', { class: 'heads', 'aria-hidden': 'true' }, ['Iteration', 'From', 'Score', 'Prompt \u2192 response'].map((head) => h('span', {}, head))), list, more];
}

const ORDERS = {
  iteration: ['by iteration', (a, b) => a.i - b.i || a.id - b.id], newest: ['newest first', (a, b) => b.i - a.i || a.id - b.id],
  low: ['lowest score first', (a, b) => (a.s ?? Infinity) - (b.s ?? Infinity)], high: ['highest score first', (a, b) => (b.s ?? -Infinity) - (a.s ?? -Infinity)], long: ['longest first', (a, b) => b.n - a.n],
};

/** Filters over samples; onChange gets those that pass, and what is wrong with the filters. */
function sampleFilters(samples, onChange) {
  const none = { kind: '', source: '', from: '', to: '', low: '', high: '', text: '' }, keep = state.filters = state.filters || { ...none, order: 'iteration' };
  const sources = [...new Set(samples.map((sample) => sample.d).filter(Boolean))].sort(), set = (name, value) => { keep[name] = value; apply(); };
  const field = (label, name, says, type = 'number') => { const input = h('input', { type, step: 'any', value: keep[name], 'data-filter': name, 'aria-label': says, on: { input: () => set(name, input.value) } }); return labelled(label, input); };
  const choice = (label, name, choices, says) => { const made = selectOf(choices, keep[name], (value) => set(name, value), says); made.dataset.filter = name; return labelled(label, made); };
  function apply() {
    const text = keep.text.toLowerCase(), [from, to, low, high] = ['from', 'to', 'low', 'high'].map((name, i) => (keep[name] === '' ? [-Infinity, Infinity][i % 2] : Number(keep[name]))), scored = keep.low !== '' || keep.high !== '';
    const found = samples.filter((s) => (!keep.kind || s.k === keep.kind) && (!keep.source || s.d === keep.source) && s.i >= from && s.i <= to
      && (!scored || (typeof s.s === 'number' && s.s >= low && s.s <= high)) && (!text || `${s.p}\n${s.r}`.toLowerCase().includes(text)));
    clear.disabled = Object.keys(none).every((name) => keep[name] === '');
    onChange(found.sort(ORDERS[keep.order][1]), (low > high && 'The lowest score is above the highest.') || (from > to && 'The first iteration is after the last.'));
  }
  const clear = button({ id: 'clear-filters' }, () => {
    Object.assign(keep, none);
    element.querySelectorAll('[data-filter]').forEach((control) => { control.value = keep[control.dataset.filter]; });
    apply();
  }, 'Clear filters');
  const element = h('div', { class: 'controls', role: 'search', 'aria-label': 'Filters of samples' },
    choice('From', 'kind', [['', 'all'], ['training', 'training'], ['validation', 'validation']], 'Training or validation'), sources.length > 1 ? choice('Source', 'source', [['', 'all'], ...sources.map((s) => [s, s])], 'Data source') : null,
    field('Iterations from', 'from', 'First iteration'), field('to', 'to', 'Last iteration'), field('Score from', 'low', 'Lowest score'), field('to', 'high', 'Highest score'), field('Search', 'text', 'Search prompts and responses', 'search'),
    choice('Order', 'order', Object.entries(ORDERS).map(([name, [text]]) => [name, text]), 'Order of samples'), clear);
  return { apply, element };
}

function samplesOf(run, { samples, seen }) {
  const left = card({}, ''), right = h('div', { class: 'card', id: 'sample' }), count = h('p', { class: 'small soft', role: 'status', id: 'sample-count' }), logged = run.config['logging.samples'];
  const scales = Object.fromEntries(Object.keys(NUMBERS).map((kind) => { // the size that 95% of the tokens of a run do not exceed
    const sizes = known(samples.flatMap((sample) => sample.num?.[kind] || [])).map(Math.abs).sort((a, b) => a - b);
    return [kind, sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 0];
  }));
  const some = logged === undefined || logged === 'all' ? '' : `The run logs ${logged} responses of each iteration and of each validation (logging.samples); scores are means over all of them.`;
  const filters = sampleFilters(samples, (found, wrong) => {
    count.textContent = `${found.length} of ${samples.length} samples`;
    right.replaceChildren(soft(wrong || `No logged sample passes the filters. ${some && `${some} Others may pass.`}`));
    left.replaceChildren(count, ...sampleList(found, (sample) => right.replaceChildren(...sampleView(sample, scales))));
  });
  filters.apply();
  return [soft(seen > samples.length ? `${samples.length} of the ${seen} samples that the run wrote, evenly chosen. mindspeed-rlxf report --samples sets their number.` : ''),
    filters.element, h('div', { class: 'split' }, left, right)];
}

function samplesSection(runs, loaded) {
  const made = section('samples', 'Samples', h('p', { role: 'status', class: 'soft' }, 'Reading the samples ...')), status = made.lastChild;
  loaded.then((all) => {
    if (!all.some((each) => each.samples.length)) { status.textContent = 'The run wrote no samples (logging.samples).'; return; }
    status.replaceWith(...known(oneOf(runs, 'samplesOf', 'Run whose samples are shown', (at) => samplesOf(runs[at], all[at]))));
  }).catch((error) => { status.textContent = `The samples cannot be shown: ${error.message}`; status.className = 'error'; });
  return made;
}

// Summary, configuration
const STATES = { finished: 'good', running: 'plain', failed: 'bad', stopped: 'watch' };

/** The answers of a run in words, and what is unhealthy. */
function runSummary(run, color, several) {
  const { problems } = run, of = (rows, level) => rows.filter((each) => each.level === level).length, bad = of(problems, 'bad'), watch = of(problems, 'watch');
  const health = { q: 'Is anything unhealthy?', short: [bad && `${bad} unhealthy`, watch && `${watch} to watch`].filter(Boolean).join(', ') || 'nothing found', level: bad ? 'bad' : watch ? 'watch' : 'good',
    text: problems.length ? problems[0].text : 'No health rule has a finding.' };
  return h('div', {}, h('p', {}, several ? h('b', {}, runSwatch(color), run.name, ' ') : null, h('span', { class: `tag ${STATES[run.state]}` }, run.state), ` ${run.done}${run.planned ? ` of ${run.planned}` : ''} iterations, ${seconds(run.seconds)}`),
    h('div', { class: 'answers' }, [...run.answers, health].map(({ q, short, text, level }) => h('div', { class: 'card answer' }, h('h3', {}, q), h('p', { class: `short ${level}` }, short), h('p', { class: 'small' }, text)))),
    problems.length ? card({}, 'Health', h('ul', { class: 'ills' }, problems.map(({ level, iteration, text, remedy }) => h('li', {}, h('span', { class: `tag ${level}` }, level === 'bad' ? 'unhealthy' : 'watch'), ' ', text, iteration ? h('span', { class: 'soft' }, ` (iteration ${iteration})`) : '', h('div', { class: 'small soft' }, remedy))))) : null);
}

function configSection(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort(), several = runs.length > 1, body = h('div', { class: 'card' });
  const text = (value) => (value === undefined ? '(absent)' : typeof value === 'string' ? value : JSON.stringify(value));
  const only = h('input', { type: 'checkbox', checked: several, on: { change: show } }), search = h('input', { type: 'search', 'aria-label': 'Find a key', on: { input: show } });
  function show() {
    const rows = keys.map((key) => [key, ...runs.map((run) => text(run.config[key]))]).filter((row) => (!several || !only.checked || new Set(row.slice(1)).size > 1) && row.join(' ').toLowerCase().includes(search.value.toLowerCase()));
    body.replaceChildren(rows.length ? table(['Key', ...runs.map((run) => run.name)], rows.map(([key, ...values]) => [breakable(key), ...values]), 'Configuration') : soft('None.'));
  }
  show();
  const changes = runs.flatMap((run) => run.changes.map((change) => [run.name, change.file, change.key, text(change.before), text(change.after)]));
  return section('config', several ? 'Configuration and differences' : 'Configuration', h('div', { class: 'controls' }, several ? h('label', {}, only, 'Differences only') : null, labelled('Find', search)), body,
    changes.length ? card({}, 'Changed when the run was taken up again', table(['Run', 'File', 'Key', 'Before', 'After'], changes, 'Changes')) : null);
}

// The page, its theme, and the updates of a live page
async function show(page) {
  const { runs, made } = await load('main', page), charts = chartsOf(runs), top = html.scrollTop, names = runs.map((run) => run.name).join(', ');
  const links = [['summary', 'Summary'], ['curves', 'Curves'], ['time', 'Time'], ['samples', 'Samples'], ['config', 'Configuration']];
  state.listeners.clear();
  document.getElementById('head').replaceChildren(h('div', { class: 'bar' }, h('h1', {}, names), h('span', { class: 'small', id: 'subject' }, [...new Set(runs.map((run) => run.subject).filter(Boolean))].join('; ')), h('span', { class: 'soft small', id: 'made' }, `${LIVE ? 'live, ' : ''}${made}`),
    h('nav', { 'aria-label': 'Sections' }, links.map(([id, text]) => h('a', { href: `#${id}` }, text)), button({ id: 'theme', 'aria-label': 'Switch between light and dark' }, () => setTheme(html.dataset.theme !== 'dark'), 'Light / dark'))));
  document.getElementById('main').replaceChildren(
    section('summary', 'Summary', runs.map((run, color) => runSummary(run, color, runs.length > 1)), h('div', {}, curveControls(runs)), h('div', { class: 'grid', id: 'key-charts' }, KEY_CHARTS.flatMap((test) => charts.find((chart) => test.test(chart.name)) || []).map((chart) => chartOf(chart, runs)))),
    curvesSection(runs, charts), section('time', 'Time', oneOf(runs, 'timeOf', 'Run whose time is shown', (at) => phaseCards(runs[at]))),
    samplesSection(runs, load('samples', page)), configSection(runs));
  html.scrollTop = top;
  document.body.dataset.ready = 'yes';
}

const setTheme = (dark) => { html.dataset.theme = dark ? 'dark' : 'light'; redraw(); };

/** Ask a live server for its version every two seconds; show the page anew when it has changed. */
async function follow() {
  for (let version = html.dataset.live; ;) {
    await new Promise((done) => { setTimeout(done, 2000); });
    try {
      const now = await (await fetch('version', { cache: 'no-store' })).text();
      if (now === version || document.activeElement?.matches('input, select')) continue;
      await show(new DOMParser().parseFromString(await (await fetch('.', { cache: 'no-store' })).text(), 'text/html'));
      version = now;
    } catch (error) {
      document.getElementById('made').textContent = 'the server has ended; this is the last state';
    }
  }
}

const system = matchMedia('(prefers-color-scheme: dark)');
setTheme(system.matches);
system.addEventListener('change', () => setTheme(system.matches));
let resized = 0;
addEventListener('resize', () => { clearTimeout(resized); resized = setTimeout(redraw, 120); });
addEventListener('keydown', (event) => {
  if (event.key !== '/' || event.target.matches('input, select, textarea')) return;
  event.preventDefault();
  document.getElementById('metric-search')?.focus();
});
show(document).then(() => { if (LIVE) follow(); }).catch((error) => {
  const status = document.getElementById('status');
  if (status) { status.textContent = `The report cannot be shown: ${error.message}`; status.className = 'error'; }
  throw error;
});
