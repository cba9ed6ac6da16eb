// A chart of lines over iterations: drag or + and - zoom all charts, the arrow keys read values.

const PAD = { left: 52, right: 16, top: 8, bottom: 34 };

/** Means of `count` neighbours around each value, fewer at the ends; null stays a gap. */
function smooth(ys, count) {
  return ys.map((y, i) => {
    if (y === null) return null;
    const side = (count - 1) / 2, near = ys.slice(Math.max(i - side, 0), i + side + 1).filter((v) => v !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || rough;
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

/** Ticks of a logarithmic axis: powers of ten, or evenly where there is none. */
function logTicks(low, high) {
  const found = [];
  for (let p = Math.ceil(Math.log10(low)); p <= Math.log10(high); p += 1) found.push(10 ** p);
  return found.length > 1 ? found : ticks(low, high, 3).filter((t) => t > 0);
}

/** Make the scale of an axis: value -> place. */
function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (v) => v;
  const a = f(low), span = f(high) - a || 1;
  return (value) => from + ((f(value) - a) / span) * (to - from);
}

/** A healthy range in words: `0 to 0.5`, `at most 1`. */
function rangeText([low, high]) {
  if (low === null) return `at most ${num(high)}`;
  if (high === null) return `at least ${num(low)}`;
  return low === high ? num(low) : `${num(low)} to ${num(high)}`;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); }
  return [low, high];
}

/** Path through points; a null begins a new stretch. */
function pathOf(xs, ys) {
  let path = '', pen = false;
  xs.forEach((x, i) => {
    if (ys[i] === null) { pen = false; return; }
    path += `${pen ? 'L' : 'M'}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
    pen = true;
  });
  return path;
}

const KEYS = 'Arrow keys read values, + and - zoom, 0 shows all.';

/** Describe the lines in a sentence for those who do not see them. */
function sayLines(title, lines) {
  const each = lines.map((line) => {
    const known = line.y.map((y, i) => [line.x[i], y]).filter(([, y]) => y !== null);
    if (!known.length) return `${line.label}: no values`;
    const [low, high] = extent(known.map(([, y]) => y));
    const [first, last] = [known[0], known[known.length - 1]];
    return `${line.label}: ${num(first[1])} at iteration ${first[0]}, ${num(last[1])} at iteration ${last[0]}, lowest ${num(low)}, highest ${num(high)}`;
  });
  return `${title}. ${each.join('. ')}. ${KEYS}`;
}

/**
 * Make a chart. lines: [{label, color, x, y, low, high}], low and high (arrays or null) a band.
 * meaning, judged, same: texts below the title; remedy: shown on hover; dots: no lines between values
 * healthy: [low, high] with nulls, drawn as dashed lines
 */
function lineChart({ title, meaning, judged, same, remedy, unit, lines, healthy, wide, dots }) {
  const svg = h('svg', { role: 'img', tabindex: '0', 'aria-label': sayLines(title, lines) });
  const readout = h('output', { 'aria-live': 'polite' });
  const card = h('div', { class: wide ? 'card chart wide' : 'card chart' },
    h('h3', {}, breakable(title), unit ? h('span', { class: 'soft' }, ` (${unit})`) : null),
    meaning ? h('p', { class: 'soft note' }, meaning) : null, same ? h('p', { class: 'soft note' }, `Same values: ${same.join(', ')}`) : null,
    healthy ? h('p', { class: 'soft note', title: remedy ? `Otherwise: ${remedy}` : false }, h('span', { class: 'dash' }), `healthy ${rangeText(healthy)}${judged ? `; ${judged}` : ''}`) : null, svg, readout);
  const all = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let at = null, place = null, drag = null;

  const shown = () => lines.filter((line) => !state.hidden.has(line.label));
  const window_ = () => state.zoom || [all[0], Math.max(all[all.length - 1], all[0] + 1)];

  function draw() {
    const box = svg.getBoundingClientRect(), width = Math.max(box.width, 200), height = Math.max(box.height, 120);
    const [x0, x1] = window_();
    const visible = shown().map((line) => {
      const keep = line.x.map((x, i) => i).filter((i) => line.x[i] >= x0 && line.x[i] <= x1);
      const average = line.y.length > 30 && state.smoothing > 1 && !dots ? smooth(line.y, state.smoothing) : null;
      const pick = (ys) => (ys ? keep.map((i) => ys[i]) : null), side = (ys) => (state.range ? pick(ys) : null);
      return { ...line, x: pick(line.x), y: pick(line.y), average: pick(average), low: side(line.low), high: side(line.high) };
    });
    const values = visible.flatMap((v) => [...v.y, ...(v.average || []), ...(v.low || []), ...(v.high || [])]).filter((v) => v !== null);
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    if (!values.length) { svg.replaceChildren(h('text', { x: width / 2, y: height / 2, 'text-anchor': 'middle' }, emptyText())); place = null; return; }
    let [low, high] = extent(values);
    const log = state.log && low > 0;
    if (low === 0 && high === 0) high = 1; else if (low === high) { const by = log ? low * 0.1 : Math.abs(low) * 0.1 || 1; low -= by; high += by; } else if (!log) { const by = (high - low) * 0.05; low -= by; high += by; }
    const sx = scale(x0, x1, PAD.left, width - PAD.right, false), sy = scale(low, high, height - PAD.bottom, PAD.top, log);
    place = { sx, sy, x0, x1, width, height, visible };
    const marked = (log ? logTicks(low, high) : ticks(low, high, 4)).filter((t) => !dots || Number.isInteger(t));
    const parts = marked.flatMap((t) => [
      h('line', { class: 'rule', x1: PAD.left, x2: width - PAD.right, y1: sy(t), y2: sy(t) }),
      h('text', { x: PAD.left - 5, y: sy(t) + 4, 'text-anchor': 'end' }, num(t, 5))]);
    for (const t of ticks(x0, x1, Math.max(3, Math.floor(width / 60)))) if (Number.isInteger(t)) parts.push(h('text', { x: sx(t), y: height - 20, 'text-anchor': 'middle' }, String(t)));
    parts.push(h('text', { x: (PAD.left + width - PAD.right) / 2, y: height - 4, 'text-anchor': 'middle' }, 'iteration'));
    for (const limit of healthy || []) if (limit !== null && limit > low && limit < high) parts.push(h('line', { class: 'healthy', x1: PAD.left, x2: width - PAD.right, y1: sy(limit), y2: sy(limit) }));
    if (state.log && !log) parts.push(h('text', { class: 'linear', x: width - PAD.right, y: PAD.top + 8, 'text-anchor': 'end' }, 'linear: some values are 0 or negative'));
    for (const line of visible) parts.push(...marks(line, sx, sy));
    svg.replaceChildren(...parts, h('g', { class: 'over' }));
    point(at);
  }

  function emptyText() {
    const known = shown().some((line) => line.y.some((y) => y !== null));
    if (!known) return shown().length ? 'no finite values' : 'no run is shown';
    return `no value in iterations ${Math.ceil(window_()[0])} to ${Math.floor(window_()[1])}`;
  }

  function marks(line, sx, sy) {
    const xs = line.x.map(sx), to = (ys) => ys.map((y) => (y === null || y === undefined ? null : sy(y)));
    const color = `k${line.color % COLORS}`, found = [];
    if (line.low && line.high) {
      const ok = line.x.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
      const up = ok.map((i) => `${xs[i].toFixed(1)} ${sy(line.high[i]).toFixed(1)}`), down = ok.map((i) => `${xs[i].toFixed(1)} ${sy(line.low[i]).toFixed(1)}`).reverse();
      if (ok.length > 1) found.push(h('path', { class: `band ${color}`, d: `M${[...up, ...down].join('L')}Z` }));
    }
    if (line.average) found.push(h('path', { class: `raw ${color}`, d: pathOf(xs, to(line.y)) }));
    if (!dots) found.push(h('path', { class: `line ${color}`, d: pathOf(xs, to(line.average || line.y)) }));
    if (dots || line.x.length <= 40) line.y.forEach((y, i) => { if (y !== null) found.push(h('circle', { class: `dot ${color}`, cx: xs[i], cy: sy(y), r: 2.6 })); });
    return found;
  }

  /** Show the values at an iteration; null shows none. */
  function point(iteration) {
    at = iteration;
    const over = svg.querySelector('.over');
    if (!over) return;
    over.replaceChildren();
    if (at === null || !place || at < place.x0 || at > place.x1) { readout.textContent = svg.matches(':focus-visible') ? KEYS : ''; return; }
    over.append(h('line', { class: 'cross', x1: place.sx(at), x2: place.sx(at), y1: PAD.top, y2: place.height - PAD.bottom }));
    const said = [];
    for (const line of place.visible) {
      const i = line.x.indexOf(at);
      if (i < 0) continue;
      if (line.y[i] !== null) over.append(h('circle', { class: `dot k${line.color % COLORS}`, cx: place.sx(at), cy: place.sy(line.y[i]), r: 3.6 }));
      const band = line.low && line.low[i] !== null ? ` (${num(line.low[i])} to ${num(line.high[i])})` : '';
      said.push(`${lines.length > 1 ? `${line.label} ` : ''}${num(line.y[i])}${band}`);
    }
    readout.textContent = `iteration ${at}: ${said.join(', ')}`;
  }

  const iterationAt = (event) => {
    const box = svg.getBoundingClientRect(), inner = box.width - PAD.left - PAD.right;
    return place.x0 + ((event.clientX - box.left - PAD.left) / inner) * (place.x1 - place.x0);
  };
  const nearest = (x) => all.reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best), all[0]);
  const setZoom = (zoom) => { state.zoom = zoom; redraw(); };

  svg.addEventListener('pointermove', (event) => {
    if (!place) return;
    const x = iterationAt(event);
    point(nearest(Math.min(Math.max(x, place.x0), place.x1)));
    if (drag === null) return;
    const [a, b] = [place.sx(drag), place.sx(x)].sort((m, n) => m - n);
    svg.querySelector('.over').append(h('rect', { class: 'pick', x: a, width: b - a, y: PAD.top, height: place.height - PAD.top - PAD.bottom }));
  });
  svg.addEventListener('pointerdown', (event) => { if (place && event.button === 0) drag = iterationAt(event); });
  svg.addEventListener('pointerup', (event) => {
    if (drag === null || !place) return;
    const [a, b] = [drag, iterationAt(event)].sort((m, n) => m - n);
    drag = null;
    if (b - a >= 1 && (b - a) / (place.x1 - place.x0) > 0.02) setZoom([Math.max(a, all[0]), Math.min(b, all[all.length - 1])]);
  });
  svg.addEventListener('pointerleave', () => { drag = null; if (document.activeElement !== svg) point(null); });
  svg.addEventListener('dblclick', () => setZoom(null));
  svg.addEventListener('focus', () => point(at));
  svg.addEventListener('blur', () => { point(null); readout.textContent = ''; });
  svg.addEventListener('keydown', (event) => {
    if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
    const within = all.filter((x) => x >= place.x0 && x <= place.x1), now = at === null ? -1 : within.indexOf(at);
    const [x0, x1] = [place.x0, place.x1], middle = at === null ? (x0 + x1) / 2 : at;
    const moves = { ArrowRight: Math.min(now + 1, within.length - 1), ArrowLeft: now < 0 ? within.length - 1 : Math.max(now - 1, 0), Home: 0, End: within.length - 1, PageDown: Math.min(now + 10, within.length - 1), PageUp: Math.max(now - 10, 0) };
    if (event.key in moves) point(within[moves[event.key]]);
    else if (event.key === '+' || event.key === '=') setZoom([Math.max(all[0], middle - (x1 - x0) / 4), Math.min(all[all.length - 1], middle + (x1 - x0) / 4)]);
    else if (event.key === '-') { const next = [Math.max(all[0], middle - (x1 - x0)), Math.min(all[all.length - 1], middle + (x1 - x0))]; setZoom(next[0] === all[0] && next[1] === all[all.length - 1] ? null : next); } else if (event.key === '0' || event.key === 'Escape') setZoom(null);
    else return;
    event.preventDefault();
  });
  drawWhenSeen(card, draw);
  return card;
}
