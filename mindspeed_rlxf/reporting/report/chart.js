// Charts over iterations, drawn by uPlot: drag or + and - zoom all charts, the arrow keys read values.

const HEIGHT = 205;
const KEYS = 'Arrow keys read values, + and - zoom, 0 shows all.';
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colorOf = (i) => css(`--c${i % COLORS}`);
const faint = (color) => `color-mix(in srgb, ${color} 45%, transparent)`;

/** Means of `count` neighbours around each value, fewer at the ends; null stays a gap. */
function smooth(ys, count) {
  return ys.map((y, i) => {
    if (y === null) return null;
    const side = (count - 1) / 2, near = ys.slice(Math.max(i - side, 0), i + side + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

/** A healthy range in words: `0 to 0.5`, `at most 1`. */
function rangeText([low, high]) {
  if (low === null) return `at most ${num(high)}`;
  if (high === null) return `at least ${num(low)}`;
  return low === high ? num(low) : `${num(low)} to ${num(high)}`;
}

/**
 * Add a plot to a card. xs: all iterations; describe() returns uPlot's {series, data} for the present state,
 * and what else differs: {bands, log, low, hooks, empty}; read(i) says the values at index i of data[0].
 */
function addPlot(card, { xs, label, describe, read, values, zooms }) {
  const box = h('div', { class: 'plot', role: 'img', tabindex: '0', 'aria-label': `${label} ${zooms ? KEYS : 'Arrow keys read the iterations.'}` });
  const readout = h('output', { 'aria-live': 'polite' });
  const last = Math.max(xs[xs.length - 1], xs[0] + 1), setZoom = (zoom) => { state.zoom = zoom; redraw(); };
  const shown = () => (zooms && state.zoom) || [xs[0], last];
  let plot = null, at = null;
  card.append(box, readout);

  function draw() {
    const { series, data, bands, log, low, hooks = {}, empty } = describe(shown()), soft = css('--soft'), grid = { stroke: css('--line'), width: 1 };
    plot?.destroy();
    plot = box.plot = null;
    if (empty) { box.replaceChildren(h('p', { class: 'soft empty' }, empty)); return; }
    const axis = { stroke: soft, grid, ticks: { show: false }, font: '11px system-ui, sans-serif' };
    box.replaceChildren();
    plot = box.plot = new uPlot({
      width: Math.max(box.clientWidth, 200), height: HEIGHT, legend: { show: false }, bands, padding: [8, 14, 0, 0],
      cursor: { y: false, drag: { x: Boolean(zooms), y: false, setScale: false }, points: { size: 7 } },
      scales: { x: { time: false, range: () => (zooms ? shown() : [xs[0] - 0.5, last + 0.5]) }, y: { distr: log ? 3 : 1, range: (u, a, b) => room(a, b, log, low) } },
      axes: [{ ...axis, grid: { show: false }, label: 'iteration', labelSize: 16, labelFont: axis.font, size: 24, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
        { ...axis, size: 54, space: 34, values: (u, all) => all.map(values || ((v) => (v === null ? '' : num(v, 5)))) }],
      hooks: { setCursor: [(u) => { if ((u.cursor.idx ?? null) !== null || document.activeElement !== box) say(u.cursor.idx); }], setSelect: [(u) => {
        const [a, b] = [u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x')];
        if (u.select.width > 8 && b - a >= 1) setZoom([Math.max(a, xs[0]), Math.min(b, last)]);
      }], ...hooks },
      series: [{}, ...series],
    }, data, box);
  }

  function say(i) {
    at = i ?? null;
    readout.textContent = at !== null ? read(plot, at) : box.matches(':focus-visible') ? (zooms ? KEYS : 'Arrow keys read the iterations.') : '';
  }

  box.addEventListener('focus', () => say(at));
  box.addEventListener('blur', () => say(null));
  if (zooms) box.addEventListener('dblclick', () => setZoom(null));
  box.addEventListener('keydown', (event) => {
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const [x0, x1] = shown(), all = plot.data[0], from = all.findIndex((x) => x >= x0), to = all.findLastIndex((x) => x <= x1), middle = at === null ? (x0 + x1) / 2 : all[at];
    const moves = { ArrowRight: Math.min((at ?? from - 1) + 1, to), ArrowLeft: at === null ? to : Math.max(at - 1, from), Home: from, End: to, PageDown: Math.min((at ?? from) + 10, to), PageUp: Math.max((at ?? from) - 10, from) };
    const zoomBy = (factor) => [Math.max(xs[0], middle - (x1 - x0) * factor), Math.min(last, middle + (x1 - x0) * factor)];
    if (event.key in moves) { plot.setCursor({ left: plot.valToPos(all[moves[event.key]], 'x'), top: 1 }); say(moves[event.key]); }
    else if (zooms && (event.key === '+' || event.key === '=')) setZoom(zoomBy(0.25));
    else if (zooms && event.key === '-') { const next = zoomBy(1); setZoom(next[0] === xs[0] && next[1] === last ? null : next); }
    else if (zooms && (event.key === '0' || event.key === 'Escape')) setZoom(null);
    else return;
    event.preventDefault();
  });
  drawWhenSeen(card, draw);
}

/** Limits of the vertical axis around values. */
function room(low, high, log, base) {
  if (low === null) return [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  if (log) return low === high ? [low * 0.9, high * 1.1] : [low, high];
  const by = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
  return [base ?? low - by, high + by];
}

/** Describe the lines in a sentence for those who do not see them. */
function sayLines(title, lines) {
  const each = lines.map((line) => {
    const known = line.y.map((y, i) => [line.x[i], y]).filter(([, y]) => y !== null), ys = known.map(([, y]) => y);
    if (!known.length) return `${line.label}: no values`;
    const [first, last] = [known[0], known[known.length - 1]];
    return `${line.label}: ${num(first[1])} at iteration ${first[0]}, ${num(last[1])} at iteration ${last[0]}, lowest ${num(ys.reduce((a, b) => Math.min(a, b)))}, highest ${num(ys.reduce((a, b) => Math.max(a, b)))}`;
  });
  return `${title}. ${each.join('. ')}.`;
}

/**
 * Make a chart. lines: [{label, color, x, y, low, high}], low and high (arrays or null) a band.
 * meaning, judged, same: texts below the title; remedy: shown on hover; dots: no lines between values
 * healthy: [low, high] with nulls, drawn as dashed lines
 */
function lineChart({ title, meaning, judged, same, remedy, unit, lines, healthy, dots }) {
  const card = h('div', { class: 'card chart' },
    h('h3', {}, breakable(title), unit ? h('span', { class: 'soft' }, ` (${unit})`) : null),
    meaning ? h('p', { class: 'soft note' }, meaning) : null, same ? h('p', { class: 'soft note' }, `Same values: ${same.join(', ')}`) : null,
    healthy ? h('p', { class: 'soft note', title: remedy ? `Otherwise: ${remedy}` : false }, h('span', { class: 'dash' }), `healthy ${rangeText(healthy)}${judged ? `; ${judged}` : ''}`) : null);
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b), index = new Map(xs.map((x, i) => [x, i]));
  const align = (line, ys) => { const all = xs.map(() => undefined); line.x.forEach((x, i) => { all[index.get(x)] = ys[i]; }); return all; };
  const visible = () => lines.filter((line) => !state.hidden.has(line.label));

  function describe([x0, x1]) {
    const series = [], data = [xs], bands = [], found = visible(), seen = found.flatMap((line) => line.y.filter((y, i) => y !== null && line.x[i] >= x0 && line.x[i] <= x1));
    if (!seen.length) return { empty: found.some((line) => line.y.some((y) => y !== null)) ? `no value in iterations ${Math.ceil(x0)} to ${Math.floor(x1)}` : found.length ? 'no finite values' : 'no run is shown' };
    const log = state.log && seen.every((y) => y > 0), add = (line, ys, settings) => { data.push(align(line, ys)); series.push({ spanGaps: false, points: { show: false }, ...settings }); };
    for (const line of found) {
      const color = colorOf(line.color), points = { show: dots || line.x.length <= 40, size: 5, fill: color };
      const average = line.y.length > 30 && state.smoothing > 1 && !dots ? smooth(line.y, state.smoothing) : null;
      if (state.range && line.low && line.high) {
        add(line, line.high, { width: 0 });
        add(line, line.low, { width: 0 });
        bands.push({ series: [series.length - 1, series.length], fill: `color-mix(in srgb, ${color} 14%, transparent)` });
      }
      if (average) add(line, line.y, { stroke: faint(color), width: 0.9, points });
      add(line, average || line.y, { label: line.label, stroke: color, width: dots ? 0 : 1.8, paths: dots ? () => null : undefined, ...(average ? {} : { points }) });
    }
    const limits = (u) => {
      const { ctx, bbox } = u;
      ctx.save();
      ctx.strokeStyle = css('--good');
      ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
      for (const limit of healthy || []) {
        if (limit === null || limit <= u.scales.y.min || limit >= u.scales.y.max) continue;
        const y = u.valToPos(limit, 'y', true);
        ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      }
      ctx.restore();
    };
    linear.hidden = log || !state.log;
    return { series, data, bands, log, hooks: { drawAxes: [limits] } };
  }

  const read = (u, i) => `iteration ${xs[i]}: ${visible().flatMap((line) => {
    const at = line.x.indexOf(xs[i]);
    if (at < 0) return [];
    const band = state.range && line.low && line.low[at] !== null ? ` (${num(line.low[at])} to ${num(line.high[at])})` : '';
    return [`${lines.length > 1 ? `${line.label} ` : ''}${num(line.y[at])}${band}`];
  }).join(', ')}`;
  const linear = h('p', { class: 'soft note linear', hidden: true }, 'linear: some values are 0 or negative');
  card.append(linear);
  addPlot(card, { xs, label: sayLines(title, lines), describe, read, zooms: true, values: dots ? (v) => (Number.isInteger(v) ? String(v) : '') : null });
  return card;
}
