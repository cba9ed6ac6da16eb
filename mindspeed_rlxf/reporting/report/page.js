// The page: summary, sections, theme, and the updates of a live page.

const STATES = { finished: 'good', running: 'plain', failed: 'bad', stopped: 'watch' };

function header(runs, made) {
  const theme = h('button', { type: 'button', id: 'theme', 'aria-label': 'Switch between light and dark', on: { click: () => {
    const dark = (document.documentElement.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
    document.documentElement.dataset.theme = dark ? 'light' : 'dark';
    redraw();
  } } }, 'Light / dark');
  const links = [['summary', 'Summary'], ['curves', 'Curves'], ['time', 'Time'], ['samples', 'Samples'], ['record', 'Record'], ['config', 'Configuration']];
  return h('div', { class: 'bar' }, h('h1', {}, runs.map((run) => run.name).join(', ')), h('span', { class: 'small', id: 'subject' }, [...new Set(runs.map((run) => run.subject).filter(Boolean))].join('; ')), h('span', { class: 'soft small', id: 'made' }, `${LIVE ? 'live, ' : ''}${made}`), h('nav', { 'aria-label': 'Sections' }, links.map(([id, text]) => h('a', { href: `#${id}` }, text)), theme));
}

function answerCard({ q, short, text, level }) {
  return h('div', { class: 'card answer' }, h('h3', {}, q), h('p', { class: `short ${level}` }, short), h('p', { class: 'small' }, text));
}

/** What is ill, in words: the worst first. */
function healthCard(run) {
  const bad = run.illnesses.filter((each) => each.level === 'bad').length, watch = run.illnesses.length - bad;
  const short = bad ? `${bad} unhealthy${watch ? `, ${watch} to watch` : ''}` : watch ? `${watch} to watch` : 'nothing found';
  return { q: 'Is anything unhealthy?', short, level: bad ? 'bad' : watch ? 'watch' : 'good', text: run.illnesses.length ? run.illnesses[0].text : `None of the ${run.checks.filter((each) => each.level === 'good').length} checks below has a finding.` };
}

const OUTCOMES = { good: 'fine', watch: 'watch', plain: 'not judged' };

/** All checks with their limits and outcomes, so that "fine" is not mistaken for "not checked". */
function checkList(run) {
  const count = (level) => run.checks.filter((each) => each.level === level).length;
  const rows = run.checks.map(({ name, limit, outcome, level }) => [h('span', {}, breakable(name)), limit, h('span', { class: `tag ${level}` }, OUTCOMES[level]), outcome]);
  return h('details', { class: 'card checks' }, h('summary', {}, `What was checked: ${count('good')} fine, ${count('watch')} to watch, ${count('plain')} not judged`), table(['Check', 'Limit', 'Result', 'Measured'], rows, 'Checks'));
}

function illnessList(run) {
  if (!run.illnesses.length) return null;
  return h('div', { class: 'card' }, h('h3', {}, 'Health'), h('ul', { class: 'ills' }, run.illnesses.map(({ level, iteration, text, remedy }) => h('li', {}, h('span', { class: `tag ${level}` }, level === 'bad' ? 'unhealthy' : 'watch'), ' ', text, iteration ? h('span', { class: 'soft' }, ` (iteration ${iteration})`) : '', remedy ? h('div', { class: 'small soft' }, remedy) : null))));
}

function runSummary(run, color, several) {
  const done = run.planned ? `${run.done} of ${run.planned} iterations` : `${run.done} iterations`;
  return h('div', {}, h('p', {}, several ? h('b', {}, h('span', { class: `swatch k${color % COLORS}` }), run.name, ' ') : null, h('span', { class: `tag ${STATES[run.state]}` }, run.state), ` ${done}, ${seconds(run.seconds)}`),
    h('div', { class: 'answers' }, [...run.answers, healthCard(run)].map(answerCard)), h('p', {}), illnessList(run), checkList(run));
}

function summarySection(runs) {
  return h('section', { id: 'summary', 'aria-labelledby': 'summary-h' }, h('h2', { id: 'summary-h', class: 'hidden' }, 'Summary'), runs.map((run, color) => runSummary(run, color, runs.length > 1)),
    h('p', {}), legend(runs), curveControls(), h('div', { class: 'grid', id: 'key-charts' }, keyCharts(runs).map((chart) => chartOf(chart, runs))));
}

function table(names, rows, caption) {
  return h('div', { class: 'scroll' }, h('table', {}, h('caption', { class: 'hidden' }, caption), h('thead', {}, h('tr', {}, names.map((name) => h('th', { scope: 'col' }, name)))), h('tbody', {}, rows.map((row) => h('tr', {}, row.map((cell) => h('td', { dir: 'auto' }, cell === null || cell === undefined ? '' : cell instanceof Node ? cell : String(cell))))))));
}

function recordSection(runs) {
  const cards = runs.flatMap((run) => {
    const of = runs.length > 1 ? `, ${run.name}` : '';
    return [h('div', { class: 'card' }, h('h3', {}, `Checkpoints${of}`), run.checkpoints.length ? table(['Name', 'Size', ''], run.checkpoints.map((c) => [c.name, bytes(c.bytes), c.best ? 'best by validation' : '']), 'Checkpoints') : h('p', { class: 'soft' }, 'None on the disk.')),
      h('div', { class: 'card' }, h('h3', {}, `Failures and restarts${of}`), run.failures.length || run.resumes.length ? [run.failures.length ? table(['Time', 'Iteration', 'Role', 'Message'], run.failures.map((f) => [f.time, f.iteration, `${f.role ?? ''}${f.rank === undefined || f.rank === null ? '' : ` rank ${f.rank}`}${f.host ? ` on ${f.host}` : ''}`, f.message]), 'Failures') : null, h('ul', { class: 'small' }, run.resumes.map((line) => h('li', {}, line)))] : h('p', { class: 'soft' }, 'None.')),
      h('div', { class: 'card' }, h('h3', {}, `Environment${of}`), Object.keys(run.environment).length ? table(['', ''], Object.entries(run.environment), 'Environment') : h('p', { class: 'soft' }, 'Known from the first checkpoint on.'))];
  });
  return h('section', { id: 'record', 'aria-labelledby': 'record-h' }, h('h2', { id: 'record-h' }, 'Record'), h('div', { class: 'grid' }, cards));
}

function configSection(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort(), several = runs.length > 1, body = h('div');
  const text = (value) => (value === undefined ? '(absent)' : typeof value === 'string' ? value : JSON.stringify(value));
  const valueOf = (run, key) => (run.unused[key] ? h('span', {}, text(run.config[key]), h('span', { class: 'soft' }, ` (not used with ${run.unused[key]})`)) : text(run.config[key]));
  const differs = (key) => new Set(runs.map((run) => text(run.config[key]))).size > 1;
  const only = h('input', { type: 'checkbox', checked: several, on: { change: show } }), search = h('input', { type: 'search', 'aria-label': 'Find a key', on: { input: show } });
  function show() {
    const wanted = search.value.toLowerCase(), rows = keys.filter((key) => (!several || !only.checked || differs(key)) && `${key} ${runs.map((run) => text(run.config[key])).join(' ')}`.toLowerCase().includes(wanted));
    body.replaceChildren(rows.length ? table(['Key', ...runs.map((run) => run.name)], rows.map((key) => [h('span', {}, breakable(key)), ...runs.map((run) => valueOf(run, key))]), 'Configuration') : h('p', { class: 'soft' }, 'None.'));
  }
  show();
  const changes = runs.flatMap((run) => run.changes.map((change) => [run.name, change.file, change.key, text(change.before), text(change.after)]));
  return h('section', { id: 'config', 'aria-labelledby': 'config-h' }, h('h2', { id: 'config-h' }, several ? 'Configuration and differences' : 'Configuration'), h('div', { class: 'controls' }, several ? h('label', {}, only, 'Differences only') : null, labelled('Find', search)), h('div', { class: 'card' }, body),
    changes.length ? h('div', { class: 'card' }, h('h3', {}, 'Changed when the run was taken up again'), table(['Run', 'File', 'Key', 'Before', 'After'], changes, 'Changes')) : null);
}

async function show(page) {
  const data = await load('main', page), { runs } = data, main = document.getElementById('main'), top = document.documentElement.scrollTop;
  state.listeners.clear();
  document.getElementById('head').replaceChildren(header(runs, data.made));
  main.replaceChildren(summarySection(runs), curvesSection(runs), timeSection(runs), samplesSection(runs, load('samples', page)), recordSection(runs), configSection(runs));
  document.documentElement.scrollTop = top;
  document.body.dataset.ready = 'yes';
}

/** Ask a live server for its version every two seconds; show the page anew when it has changed. */
async function follow() {
  let version = document.documentElement.dataset.live;
  for (;;) {
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

let resized = 0;
addEventListener('resize', () => { clearTimeout(resized); resized = setTimeout(redraw, 120); });
addEventListener('keydown', (event) => {
  if (event.key !== '/' || event.target.matches('input, select, textarea')) return;
  event.preventDefault();
  document.getElementById('metric-search')?.focus();
});
(async () => {
  try {
    await show(document);
    if (LIVE) follow();
  } catch (error) {
    const status = document.getElementById('status');
    if (status) { status.textContent = `The report cannot be shown: ${error.message}`; status.className = 'error'; }
    throw error;
  }
})();
