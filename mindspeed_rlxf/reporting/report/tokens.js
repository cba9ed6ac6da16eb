// A response as tokens, coloured by advantage, KL or value.

const NUMBERS = { advantage: 'Advantage', kl: 'KL', value: 'Value' };

/** Join tokens that make one character together: [{text, from, to}]. */
function pieces(texts) {
  const found = [];
  let from = 0;
  texts.forEach((text, i) => {
    if (text === '' && i < texts.length - 1) return;
    found.push({ text, from, to: i });
    from = i + 1;
  });
  return found;
}

/** Colour of a value: green above 0, red below; KL and value by their size alone. */
function shade(value, most) {
  if (value === null || value === undefined || !most) return '';
  const part = Math.min(Math.abs(value) / most, 1) * 0.75;
  return `rgba(var(${value >= 0 ? '--up' : '--down'}), ${part.toFixed(3)})`;
}

/** Show the tokens of a sample that has numbers. */
function tokenView(sample) {
  const kinds = Object.keys(NUMBERS).filter((kind) => sample.num && sample.num[kind]);
  let kind = kinds.includes(state.tokenKind) ? state.tokenKind : kinds[0];
  const box = h('div', { class: 'text', dir: 'auto', tabindex: '0', role: 'group' }), readout = h('output', { 'aria-live': 'polite', class: 'small soft' });
  const all = pieces(sample.t), scaleText = h('span', { class: 'small soft' });
  let at = -1;
  const mean = (piece) => {
    const known = sample.num[kind].slice(piece.from, piece.to + 1).filter((v) => v !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  function say(i) {
    box.querySelectorAll('.here').forEach((token) => token.classList.remove('here'));
    at = i;
    const piece = all[i];
    if (!piece) { readout.textContent = ''; return; }
    const token = box.children[i];
    token.classList.add('here');
    token.scrollIntoView({ block: 'nearest' });
    const values = kinds.map((each) => `${NUMBERS[each]} ${sample.num[each].slice(piece.from, piece.to + 1).map((v) => num(v)).join(' and ')}`);
    readout.textContent = `token ${piece.from + 1}${piece.to > piece.from ? ` to ${piece.to + 1}` : ''} of ${sample.n}, ${JSON.stringify(piece.text)}: ${values.join(', ')}`;
  }
  function draw() {
    const most = Math.max(...sample.num[kind].map((v) => Math.abs(v ?? 0)), 1e-12);
    box.setAttribute('aria-label', `Response, ${sample.n} tokens coloured by ${NUMBERS[kind]}. Arrow keys read the tokens.`);
    box.replaceChildren(...all.map((piece, i) => h('span', { class: 'tok', background: shade(mean(piece), most), on: { pointerenter: () => say(i) } }, piece.text)));
    scaleText.textContent = `${NUMBERS[kind]}: full colour at ${num(most, 3)}; green above 0, red below`;
    if (at >= 0) say(at);
  }
  box.addEventListener('keydown', (event) => {
    const moves = { ArrowRight: Math.min(at + 1, all.length - 1), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: all.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    say(moves[event.key]);
  });
  const buttons = kinds.map((each) => h('button', { type: 'button', 'aria-pressed': String(each === kind), on: { click: (event) => {
    kind = state.tokenKind = each;
    buttons.forEach((button) => button.setAttribute('aria-pressed', String(button === event.currentTarget)));
    draw();
  } } }, NUMBERS[each]));
  draw();
  return h('div', {}, h('div', { class: 'chips', role: 'group', 'aria-label': 'Colour of the tokens' }, buttons, scaleText), box, readout);
}
