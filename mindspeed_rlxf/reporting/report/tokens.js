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

/** Colour of a value: green and red for better and worse than expected, else blue and orange. */
function shade(value, most, kind) {
  if (value === null || value === undefined || !most) return '';
  const part = Math.min(Math.abs(value) / most, 1), colors = kind === 'advantage' ? ['--up', '--down'] : ['--above', '--below'];
  return `rgba(var(${colors[value >= 0 ? 0 : 1]}), calc(${part.toFixed(3)} * var(--depth)))`;
}

/** Size of each number that 95% of the tokens of a run do not exceed: the full colour. */
function tokenScales(samples) {
  return Object.fromEntries(Object.keys(NUMBERS).map((kind) => {
    const sizes = samples.flatMap((sample) => sample.num?.[kind] || []).filter((v) => v !== null).map(Math.abs).sort((a, b) => a - b);
    return [kind, sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 0];
  }));
}

const KL_NOTE = 'The KL of a token is the log of its probability under the policy over that under the reference: it may be negative; only its mean over many tokens is not.';

/** Show the tokens of a sample that has numbers. scales: kind -> full colour, the same for all samples */
function tokenView(sample, scales) {
  const kinds = Object.keys(NUMBERS).filter((kind) => sample.num && sample.num[kind]);
  let kind = kinds.includes(state.tokenKind) ? state.tokenKind : kinds[0];
  const box = h('div', { class: 'text', dir: 'auto', tabindex: '0', role: 'group' }), readout = h('output', { 'aria-live': 'polite', class: 'small soft' });
  const all = pieces(sample.t), scaleText = h('span', { class: 'small soft' }), note = h('p', { class: 'small soft' });
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
    box.setAttribute('aria-label', `Response, ${sample.n} tokens coloured by ${NUMBERS[kind]}. Arrow keys read the tokens.`);
    box.replaceChildren(...all.map((piece, i) => h('span', { class: 'tok', background: shade(mean(piece), scales[kind], kind), on: { pointerenter: () => say(i) } }, piece.text)));
    scaleText.textContent = `${kind === 'advantage' ? 'green' : 'blue'} above 0, ${kind === 'advantage' ? 'red' : 'orange'} below; full colour from ${num(scales[kind], 3)}, the size that 95% of the run's tokens do not exceed`;
    note.textContent = kind === 'kl' && sample.num.kl.some((v) => v < 0) ? KL_NOTE : '';
    if (at >= 0) say(at);
  }
  box.addEventListener('focus', () => { if (at < 0) readout.textContent = 'Arrow keys read the tokens.'; });
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
  return h('div', {}, h('div', { class: 'chips', role: 'group', 'aria-label': 'Colour of the tokens' }, buttons, scaleText), box, readout, note);
}
