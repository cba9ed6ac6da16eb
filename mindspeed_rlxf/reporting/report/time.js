// Where the time goes: phases of each iteration, stacked, and the schedule of one iteration.

const PHASES = ['gen', 'sync', 'reward', 'old_log_prob', 'ref', 'values', 'adv', 'update_critic', 'update_actor', 'val', 'save'];
/** Phase -> its calls in the schedule. */
const CALLS = {
  gen: ['generate'], sync: ['update_weights'], reward: ['score'], old_log_prob: ['actor_rollout.log_probs'], ref: ['ref.log_probs'], values: ['values'], adv: ['make_experience'],
  update_critic: ['update_critic'], update_actor: ['update_policy'], val: ['answer_validation', 'score_by_rule', 'validation'], save: ['begin_save', 'end_save', 'save'],
};
const PHASE_COLOR = { gen: 0, sync: 10, reward: 3, old_log_prob: 7, ref: 5, values: 4, adv: 9, update_critic: 2, update_actor: 1, val: 8, save: 6 };
/** Mean seconds of a phase over the iterations that have it, and their number. */
function phaseMean(run, phase) {
  const curve = run.curves[`timing/${phase}`], known = curve ? curve.y.filter((y, i) => y > 0 && curve.x[i] > 0) : [];
  return { count: known.length, mean: known.reduce((a, b) => a + b, 0) / (known.length || 1) };
}

const swatch = (phase) => h('span', { class: phase in PHASE_COLOR ? `swatch k${PHASE_COLOR[phase]}` : 'swatch kother' });

/** The legend of both charts: each phase with its calls, its mean and, on demand, its meaning. */
function timeLegend(run) {
  const total = run.curves['timing/all']?.x.length || 0;
  const rows = PHASES.map((phase) => ({ phase, ...phaseMean(run, phase) })).filter(({ count }) => count);
  const calls = (phase) => CALLS[phase].filter((call) => call !== phase).join(', ');
  const words = (text) => h('span', {}, breakable(text));
  const meaning = (phase) => run.about[`timing/${phase}`]?.meaning || '';
  return h('div', { class: 'card', id: 'time-legend' }, h('h3', {}, 'Phases, in both charts: mean seconds of the iterations that have them'),
    h('ul', { class: 'legend' }, rows.map(({ phase, mean, count }) => h('li', { title: meaning(phase) }, swatch(phase), `${phase} `, h('span', { class: 'soft' }, `${num(mean, 3)} s${count < total ? ` in ${count} of ${total}` : ''}`)))),
    h('details', {}, h('summary', {}, 'What they are, and their calls in the schedule'), table(['Phase', 'Calls', 'What it is'], [...rows.map(({ phase }) => [words(phase), words(calls(phase) || phase), meaning(phase)]),
      ['', 'inputs', 'a rank waits for what its call reads'], ['', 'describe', 'texts and numbers of samples are gathered'], ['', 'wait for ...', 'the driver waits for the call']], 'Phases')));
}

/** Seconds of each phase, stacked: the sum of all phases is drawn first, then the sums of fewer over it. */
function phasesChart(run) {
  const xs = run.curves['timing/all']?.x;
  if (!xs) return h('p', { class: 'soft' }, 'No iteration has its times.');
  const card = h('div', { class: 'card chart', id: 'phases' }, h('h3', {}, 'Phases of each iteration, seconds'));
  const columns = PHASES.flatMap((phase) => {
    const curve = run.curves[`timing/${phase}`], known = new Map(curve?.x.map((x, i) => [x, curve.y[i]]));
    return curve && curve.y.some((y) => y > 0) ? [{ phase, ys: xs.map((x) => known.get(x) || 0) }] : [];
  });
  let sums = xs.map(() => 0);
  const stacked = columns.map(({ phase, ys }) => { sums = sums.map((sum, i) => sum + ys[i]); return { phase, sums }; }).reverse();
  const describe = () => ({ low: 0, data: [xs, ...stacked.map((each) => each.sums)], series: stacked.map(({ phase }) => ({ label: phase, width: 0, fill: colorOf(PHASE_COLOR[phase]), points: { show: false }, paths: uPlot.paths.bars({ size: [0.9, 60] }) })) });
  const read = (u, i) => `iteration ${xs[i]}: ${columns.filter(({ ys }) => ys[i] > 0).map(({ phase, ys }) => `${phase} ${num(ys[i], 3)}`).join(', ')} s`;
  const means = columns.map(({ phase }) => `${phase} ${num(phaseMean(run, phase).mean, 3)} s`).join(', ');
  addPlot(card, { xs, label: `Seconds of each phase by iteration. Means: ${means}.`, describe, read, values: (v) => `${num(v, 3)} s` });
  card.append(h('p', { class: 'soft small' }, 'val and save are stacked on top; timing/all leaves them out. A phase lasts as long as its slowest rank. Phases of roles on different devices overlap, so that a bar may be higher than the iteration was long.'));
  return card;
}

/** The colour of a call: that of its phase. */
function callColor(text, waits) {
  if (waits) return 'kw';
  const phase = PHASES.find((each) => CALLS[each].includes(text) || CALLS[each].includes(text.split('.').pop()));
  return phase ? `k${PHASE_COLOR[phase]}` : 'kother';
}

/** Round places on an axis of time. */
function ticks(end, count) {
  const power = 10 ** Math.floor(Math.log10(end / count)), step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= end / count);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** Draw the lanes of one iteration; names stand above their lanes where it is narrow. spans: [lane, name, waits, start, length] in ms */
function gantt(schedules, spans, width) {
  const narrow = width < 700, LANE = narrow ? 35 : 20, LABEL = narrow ? 0 : 190, TOP = narrow ? 15 : 0;
  const lanes = [...new Set(spans.map((span) => span[0]))].sort((a, b) => (schedules.lanes[a] < schedules.lanes[b] ? -1 : 1)).sort((a, b) => (schedules.lanes[b] === 'driver') - (schedules.lanes[a] === 'driver'));
  const row = new Map(lanes.map((lane, i) => [lane, i])), end = Math.max(...spans.map((span) => span[3] + span[4]), 1);
  const height = lanes.length * LANE + 24, sx = (ms) => LABEL + (ms / end) * (width - 8 - LABEL);
  const readout = h('output', { 'aria-live': 'polite', class: 'small soft' }, 'Point at a span, or reach it with Tab and the arrow keys.');
  const parts = ticks(end, Math.max(2, Math.floor((width - LABEL) / 100))).flatMap((t) => [h('line', { class: 'rule', x1: sx(t), x2: sx(t), y1: 0, y2: height - 18 }), h('text', { x: sx(t), y: height - 4, 'text-anchor': sx(t) < 20 ? 'start' : 'middle' }, t >= 1000 ? `${num(t / 1000, 3)} s` : `${num(t, 3)} ms`)]);
  lanes.forEach((lane, i) => parts.push(h('text', { class: 'lane', x: 0, y: i * LANE + (narrow ? 12 : 14) }, schedules.lanes[lane])));
  const order = [...spans].sort((a, b) => row.get(a[0]) - row.get(b[0]) || a[3] - b[3]);
  const blocks = order.map(([lane, name, waits, start, length], i) => {
    const text = schedules.names[name], color = callColor(text, waits);
    const inset = waits || ['validation', 'save'].includes(text) ? 5 : 2;
    const said = `${schedules.lanes[lane]}: ${text}, ${num(length, 3)} ms, begins at ${num(start, 3)} ms`;
    const speak = () => { readout.textContent = said; };
    return h('rect', { class: `block ${color}`, x: sx(start), y: row.get(lane) * LANE + TOP + inset, width: Math.max(sx(start + length) - sx(start), 1), height: LANE - TOP - 2 * inset, rx: 2,
      tabindex: i ? '-1' : '0', role: 'img', 'aria-label': said, on: { pointerenter: speak, focus: speak } }, h('title', {}, said));
  });
  const names = order.flatMap(([lane, name, waits, start, length]) => {
    const text = schedules.names[name].split('.').pop();
    return !waits && schedules.lanes[lane] !== 'driver' && sx(start + length) - sx(start) > text.length * 6.4 + 6 ? [h('text', { class: 'in', x: sx(start) + 4, y: row.get(lane) * LANE + TOP + 14, 'aria-hidden': 'true' }, text)] : [];
  });
  const svg = h('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': `Schedule, ${lanes.length} lanes, ${num(end / 1000, 3)} s`, on: { keydown: (event) => {
    const now = blocks.indexOf(document.activeElement), next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: blocks.length - 1 }[event.key];
    if (next === undefined || !blocks[next]) return;
    event.preventDefault();
    blocks.forEach((block) => block.setAttribute('tabindex', '-1'));
    blocks[next].setAttribute('tabindex', '0');
    blocks[next].focus();
  } } }, parts, blocks, names);
  return h('div', {}, h('div', { class: 'gantt' }, svg), readout);
}

function scheduleCard(run) {
  const iterations = Object.keys(run.schedules.iterations).map(Number).sort((a, b) => a - b);
  const card = h('div', { class: 'card', id: 'schedule' }, h('h3', {}, 'Schedule of one iteration'));
  if (!iterations.length) { card.append(h('p', { class: 'soft' }, 'The run has no timeline.')); return card; }
  let at = iterations.includes(state.scheduled) ? state.scheduled : iterations[Math.min(1, iterations.length - 1)];
  const body = h('div');
  const select = selectOf(iterations.map((i) => [String(i), `iteration ${i}`]), String(at), (value) => show(Number(value)), 'Iteration of the schedule');
  const go = (by) => h('button', { type: 'button', on: { click: () => show(iterations[iterations.indexOf(at) + by]) } }, by < 0 ? 'Earlier' : 'Later');
  const earlier = go(-1), later = go(1);
  let drawn = '';
  function draw() {
    const width = body.clientWidth;
    if (drawn === `${at} ${width}`) return;
    drawn = `${at} ${width}`;
    body.replaceChildren(gantt(run.schedules, run.schedules.iterations[at], width));
  }
  function show(iteration) {
    at = state.scheduled = iteration;
    select.value = String(iteration);
    earlier.disabled = at === iterations[0];
    later.disabled = at === iterations[iterations.length - 1];
    if (body.isConnected) draw();
  }
  const kept = run.schedules.seen > iterations.length ? `Schedules of ${iterations.length} of ${run.schedules.seen} iterations are kept: the first, the last, the slowest, and others evenly. ` : '';
  card.append(h('div', { class: 'controls' }, earlier, select, later, h('ul', { class: 'legend' }, h('li', {}, h('span', { class: 'swatch kw' }), 'waits'), h('li', {}, h('span', { class: 'swatch kother' }), 'driver and other calls'))), body,
    h('p', { class: 'soft small' }, `${poolText(run)}${kept}Each rank uses the clock of its host. The files in timeline/ open in ui.perfetto.dev too.`));
  show(at);
  drawWhenSeen(card, draw);
  return card;
}

/** Say which roles run on the devices of each resource pool. */
function poolText(run) {
  const pools = new Map();
  for (const [key, pool] of Object.entries(run.config)) if (key.startsWith('placement.')) pools.set(pool, [...(pools.get(pool) || []), key.slice('placement.'.length)]);
  const each = [...pools].map(([pool, roles]) => `${pool} (${roles.join(', ')}${roles.length > 1 ? ': the same devices, in turns' : ''})`);
  return `A lane is the resource pool, the role and its rank. ${each.length ? `Pools: ${each.join('; ')}. ` : ''}`;
}

function timeSection(runs) {
  const body = h('div');
  const show = (name) => { const run = runs.find((each) => each.name === name) || runs[0]; state.timeOf = run.name; body.replaceChildren(timeLegend(run), phasesChart(run), scheduleCard(run)); };
  const pick = runs.length > 1 ? h('div', { class: 'controls' }, labelled('Run', selectOf(runs.map((run) => [run.name, run.name]), state.timeOf || runs[0].name, show, 'Run whose time is shown'))) : null;
  show(state.timeOf || runs[0].name);
  return h('section', { id: 'time', 'aria-labelledby': 'time-h' }, h('h2', { id: 'time-h' }, 'Time'), pick, body);
}
