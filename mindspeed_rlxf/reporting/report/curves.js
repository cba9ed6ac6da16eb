// Families of metrics as charts, the curves of all runs in each.

const FAMILIES = [
  ['Score and reward', /^(critic\/score|critic\/rewards|reward\/)/],
  ['Validation', /^val\//],
  ['Training by data source', /^train\//],
  ['KL and log-probs', /(^critic\/kl|ppo_kl|kl_loss|log_prob_gap|is_weight)/],
  ['Lengths', /^(response_length|prompt_length)/],
  ['Entropy', /entropy/],
  ['Losses', /(loss|dpo_)/],
  ['Clip fractions', /clipfrac/],
  ['Gradient norms', /grad_norm/],
  ['Learning rates', /\/lr$/],
  ['Advantages, returns, values', /^critic\/(advantages|returns|values|vpred|explained)/],
  ['Throughput', /^(throughput|flops|mfu)/],
  ['Memory', /^memory\//],
  ['Timing', /^(timing|idle|skew|slowest_rank)/],
];
const RANKS = /^slowest_rank\//;
const BAND = /\/(mean|max|min)$/;

/** Metrics of all runs as [{name, title, low, high}]: mean, max and min of one thing are one chart. */
function chartsOf(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const has = new Set(names);
  const charts = [];
  for (const name of names) {
    const base = name.replace(BAND, ''), ends = ['mean', 'max', 'min'].every((end) => has.has(`${base}/${end}`));
    if (BAND.test(name) && ends) {
      if (name.endsWith('/mean')) charts.push({ name, title: `${base}, mean`, low: `${base}/min`, high: `${base}/max` });
    } else charts.push({ name, title: name });
  }
  return mergeEqual(charts, runs);
}

/** Put charts whose curves are equal, value by value, into one with `same`, the names of the others. */
function mergeEqual(charts, runs) {
  const rank = (chart) => (chart.low ? 0 : chart.name.endsWith('/score') ? 1 : 2), first = new Map();
  for (const chart of [...charts].sort((a, b) => rank(a) - rank(b))) {
    const curves = runs.map((run) => run.curves[chart.name]), text = JSON.stringify(curves);
    const changes = new Set(curves.flatMap((curve) => (curve ? curve.y : []))).size > 2; // constants are no copies of each other
    if (changes && !chart.low && first.has(text)) first.get(text).same.push(chart.name);
    else first.set(changes && !first.has(text) ? text : chart.name, { ...chart, same: [] });
  }
  return [...first.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}

function linesOf(chart, runs) {
  return runs.flatMap((run, color) => {
    const curve = run.curves[chart.name];
    if (!curve) return [];
    const side = (name) => {
      const other = name && run.curves[name];
      if (!other) return null;
      const known = new Map(other.x.map((x, i) => [x, other.y[i]]));
      return curve.x.map((x) => (known.has(x) ? known.get(x) : null));
    };
    return [{ label: run.name, color, x: curve.x, y: curve.y, low: side(chart.low), high: side(chart.high) }];
  });
}

function chartOf(chart, runs) {
  const about = runs.map((run) => run.about[chart.name]).find(Boolean) || {};
  return lineChart({
    title: chart.title, unit: about.unit, healthy: about.healthy, lines: linesOf(chart, runs), dots: RANKS.test(chart.name),
    meaning: about.meaning, remedy: about.remedy, judged: runs.length === 1 && runs[0].judged[chart.name], same: chart.same.length ? chart.same : null,
  });
}

/** The charts of the first screen: score, validation, KL, entropy, length, time. */
function keyCharts(runs) {
  const charts = chartsOf(runs), by = (test) => charts.find((chart) => test.test(chart.name));
  const wanted = [/^critic\/score\/mean/, /^val\/.*score$/, /^critic\/kl$/, /^actor\/entropy$/, /^response_length\/mean/, /^timing\/all$/];
  return wanted.map(by).filter(Boolean);
}

function legend(runs) {
  if (runs.length < 2) return null;
  return h('div', { class: 'chips', role: 'group', 'aria-label': 'Runs shown' }, runs.map((run, color) => {
    const button = h('button', { type: 'button', 'aria-pressed': String(!state.hidden.has(run.name)), on: { click: () => {
      if (!state.hidden.delete(run.name)) state.hidden.add(run.name);
      button.setAttribute('aria-pressed', String(!state.hidden.has(run.name)));
      redraw();
    } } }, h('span', { class: `swatch k${color % COLORS}` }), run.name);
    return button;
  }));
}

function curveControls() {
  const smoothing = h('input', { type: 'range', min: '1', max: '61', step: '2', value: state.smoothing, 'aria-label': 'Smoothing, points of a mean', on: { input: () => { state.smoothing = Number(smoothing.value); tell(); redraw(); } } });
  const smoothed = h('output', { class: 'soft small', id: 'smoothing' });
  const tell = () => { smoothed.textContent = state.smoothing > 1 ? `thick: mean of ${state.smoothing} neighbours; thin: each point` : 'none'; };
  tell();
  const log = h('input', { type: 'checkbox', checked: state.log, on: { change: () => { state.log = log.checked; redraw(); } } });
  const range = h('input', { type: 'checkbox', checked: state.range, on: { change: () => { state.range = range.checked; redraw(); } } });
  const reset = h('button', { type: 'button', id: 'reset-zoom', on: { click: () => { state.zoom = null; redraw(); } } }, 'Show all iterations');
  const zoomed = h('span', { class: 'soft small', role: 'status' });
  const say = () => { reset.disabled = !state.zoom; zoomed.textContent = state.zoom ? `iterations ${Math.ceil(state.zoom[0])} to ${Math.floor(state.zoom[1])}` : 'drag over a chart to zoom'; };
  state.listeners.add(say);
  say();
  return h('div', { class: 'controls' }, labelled('Smoothing', smoothing), smoothed, h('label', {}, log, 'Logarithmic'), h('label', {}, range, 'Smallest to largest'), reset, zoomed);
}

function curvesSection(runs) {
  const charts = chartsOf(runs), taken = new Set(), body = h('div');
  const families = [...FAMILIES.map(([name, test]) => [name, charts.filter((chart) => !taken.has(chart) && test.test(chart.name) && taken.add(chart))]), ['Other', charts.filter((chart) => !taken.has(chart))]];
  const search = h('input', { type: 'search', id: 'metric-search', placeholder: 'part of a name', 'aria-label': 'Find a metric', on: { input: show } });
  state.open = state.open || new Set(['Score and reward', 'Validation']);

  function show() {
    const wanted = search.value.trim().toLowerCase();
    const fits = (chart) => [chart.name, ...chart.same].some((name) => name.toLowerCase().includes(wanted));
    body.replaceChildren(...families.flatMap(([name, found]) => {
      const fitting = found.filter(fits);
      if (!fitting.length) return [];
      const grid = h('div', { class: 'grid' });
      const open = Boolean(wanted) || state.open.has(name);
      const details = h('details', { open, on: { toggle: () => {
        if (!wanted) { if (details.open) state.open.add(name); else state.open.delete(name); }
        if (details.open && !grid.children.length) grid.append(...fitting.map((chart) => chartOf(chart, runs)));
      } } }, h('summary', {}, name, h('span', { class: 'soft small' }, ` ${fitting.length}`)), grid);
      if (open) grid.append(...fitting.map((chart) => chartOf(chart, runs)));
      return [details];
    }), ...(families.some(([, found]) => found.some(fits)) ? [] : [h('p', { class: 'soft' }, 'No metric has this in its name.')]));
  }
  show();
  return h('section', { id: 'curves', 'aria-labelledby': 'curves-h' }, h('h2', { id: 'curves-h' }, 'Curves'), h('div', { class: 'controls' }, labelled('Find (/)', search)), body);
}
