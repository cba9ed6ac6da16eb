// Elements, numbers, data and the state that all parts share.

const SVG = 'http://www.w3.org/2000/svg';
const LIVE = Boolean(document.documentElement.dataset.live);
const COLORS = 11;

/** What the user has chosen; it outlives a redraw of a live page. */
const state = { smoothing: 9, log: false, range: false, zoom: null, hidden: new Set(), listeners: new Set() };

/** Make an element. Texts become text nodes, never markup; `on` has listeners, `data` data-*. */
function h(tag, props = {}, ...children) {
  const svg = ['svg', 'line', 'rect', 'text', 'title'].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [kind, run] of Object.entries(value)) made.addEventListener(kind, run);
    else if (name === 'value') made.value = value;
    else if (name === 'background') made.style.background = value;
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Format a number: five digits, null as an absent value. */
function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return 'none';
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function seconds(s) {
  if (s < 60) return `${num(s, 3)} s`;
  const all = Math.round(s), minutes = Math.floor(all / 60);
  return minutes < 60 ? `${minutes} min ${all % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(n) {
  const steps = ['B', 'kB', 'MB', 'GB', 'TB'];
  let at = 0;
  for (; n >= 1000 && at < steps.length - 1; at += 1) n /= 1000;
  return `${num(n, 3)} ${steps[at]}`;
}

async function unpack(compressed) {
  if (typeof DecompressionStream === 'undefined') throw new Error('this browser cannot decompress gzip; one from 2023 or later can');
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

/** Read one part of the data of a page. */
async function load(name, page = document) {
  return unpack(Uint8Array.from(atob(page.getElementById(`data-${name}`).textContent), (c) => c.charCodeAt(0)));
}

/** Run `draw` when the element first comes near the screen, and after each change of the state. */
function drawWhenSeen(element, draw) {
  let seen = false;
  const again = () => { if (!element.isConnected && seen) state.listeners.delete(again); else if (seen) draw(); };
  state.listeners.add(again);
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    seen = true;
    draw();
  }, { rootMargin: '300px' });
  watcher.observe(element);
}

const redraw = () => state.listeners.forEach((draw) => draw());

/** A text that may break after a dot, a slash or an underscore, not inside of a word. */
const breakable = (text) => text.split(/(?<=[._/])/).flatMap((part) => [part, h('wbr')]);

function labelled(text, control) {
  return h('label', {}, text, control);
}

function selectOf(choices, chosen, onChange, label) {
  const select = h('select', { 'aria-label': label, on: { change: () => onChange(select.value) } },
    choices.map(([value, text]) => h('option', { value, selected: value === chosen }, text)));
  return select;
}
