// SPDX-License-Identifier: Apache-2.0
// The table of features and the details of one. `data` and `root` come from the page: `data.facts`, and in an exported page
// `data.features`, a list of {row, details}. Without it, rows and details are requested from the server that sent the page.
// Texts are set as text nodes: nothing in them is interpreted.
const ROWS = 200;

function element(name, text, parent, kind) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  if (kind) made.className = kind;
  if (parent) parent.appendChild(made);
  return made;
}

function number(value) {
  return value === 0 ? '0' : Math.abs(value) >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function shown(text) { return text.replace(/\n/g, '↵').replace(/\t/g, '⇥'); }

// --- Where rows and details come from ---

function cosine(one) { return one.details.nearest.length ? one.details.nearest[0].cosine : -1; }

const orders = {
  'layer and index': (a, b) => a.row.layer - b.row.layer || a.row.feature - b.row.feature,
  'density, highest first': (a, b) => b.row.fired - a.row.fired,
  'density, lowest first': (a, b) => a.row.fired - b.row.fired,
  'strongest activation': (a, b) => b.row.strongest - a.row.strongest,
  'nearest feature': (a, b) => cosine(b) - cosine(a),
};

function matches(row, query) {
  if (query.fired && row.fired === 0) return false;
  if (query.layer !== '' && row.layer !== Number(query.layer)) return false;
  if (query.search === '') return true;
  const both = query.search.match(/^(\d+):(\d+)$/);
  if (both) return row.layer === Number(both[1]) && row.feature === Number(both[2]);
  if (/^\d+$/.test(query.search)) return row.feature === Number(query.search);
  return row.tokens.some(text => text.includes(query.search));
}

const embedded = {
  select: async query => {
    const found = data.features.filter(one => matches(one.row, query)).sort(orders[query.order]);
    return {count: found.length, rows: found.slice(query.offset, query.offset + ROWS).map(one => one.row)};
  },
  details: async (layer, feature) => {
    const found = data.features.find(one => one.row.layer === layer && one.row.feature === feature);
    return found ? found.details : null;
  },
};

async function requested(path, values) {
  const answer = await fetch(path + '?' + new URLSearchParams(values));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

const served = {
  select: query => requested('features', query),
  details: (layer, feature) => requested('feature', {layer, feature}),
};

const source = data.features ? embedded : served;

// --- The table ---

const controls = element('p', null, root);
element('label', 'Layer ', controls);
const layer = element('select', null, controls);
layer.id = 'layer';
element('option', 'all', layer).value = '';
for (let l = 0; l !== data.facts.layers; ++l) element('option', String(l), layer).value = String(l);
element('label', ' Index or text ', controls);
const search = element('input', null, controls);
search.id = 'search';
search.placeholder = '17, 3:17 or a token';
element('label', ' Order ', controls);
const order = element('select', null, controls);
order.id = 'order';
for (const name of data.facts.orders) element('option', name, order).value = name;
order.value = 'density, highest first';
const dead = element('input', null, element('label', ' fired only ', controls));
dead.type = 'checkbox';
dead.checked = true;
const count = element('p', null, root, 'state');
const wide = element('div', null, root, 'wide');
const pager = element('p', null, root);
const previous = element('button', 'previous', pager);
const next = element('button', 'next', pager);
const details = element('div', null, root);
details.id = 'details';
let offset = 0, asked = 0;

async function draw() {
  const mine = ++asked;
  let found;
  try {
    found = await source.select({layer: layer.value, search: search.value.trim(), order: order.value, fired: dead.checked ? '1' : '', offset});
  } catch (failure) {
    count.textContent = String(failure.message || failure);
    return;
  }
  if (mine !== asked) return;  // another request has been made meanwhile
  const last = Math.min(offset + ROWS, found.count);
  count.textContent = found.count + ' features' + (found.count > ROWS ? ', ' + (offset + 1) + ' to ' + last + ' are listed' : '') +
      '; select one to see its examples';
  previous.disabled = offset === 0;
  next.disabled = last === found.count;
  wide.textContent = '';
  const table = element('table', null, wide);
  const head = element('tr', null, element('thead', null, table));
  for (const [name, kind] of [['layer', 'n'], ['feature', 'n'], ['density', 'n'], ['mean', 'n'], ['strongest', 'n'], ['tokens', '']])
    element('th', name, head, kind);
  const body = element('tbody', null, table);
  for (const one of found.rows) {
    const row = element('tr', null, body);
    row.style.cursor = 'pointer';
    row.onclick = () => show(one.layer, one.feature);
    element('td', one.layer, row, 'n');
    element('a', one.feature, element('td', null, row, 'n')).href = '#details';
    element('td', number(one.fired / data.facts.tokens), row, 'n');
    element('td', number(one.mean), row, 'n');
    element('td', number(one.strongest), row, 'n');
    element('td', one.tokens.map(shown).join('  |  '), row);
  }
}

// --- A feature ---

// Horizontal bars: [[name, value, text]].
function bars(title, rows, parent) {
  element('h3', title, parent);
  const largest = Math.max(...rows.map(row => row[1]), 1e-30);
  const table = element('table', null, parent);
  for (const [name, value, text] of rows) {
    const line = element('tr', null, table);
    element('td', name, line, 'n');
    const bar = element('div', null, element('td', null, line));
    bar.style.cssText = 'height:0.8rem;background:var(--blue);width:' + (12 * value / largest) + 'rem';
    element('td', text, line, 'n');
  }
}

async function show(ofLayer, index) {
  const feature = await source.details(ofLayer, index);
  if (!feature) return;
  details.textContent = '';
  element('h2', 'Layer ' + feature.layer + ', feature ' + feature.feature, details);
  element('a', 'back to the list', element('p', null, details)).href = '#application';
  element('p', 'Fired on ' + feature.fired + ' of ' + feature.tokens + ' tokens; mean activation ' + number(feature.mean) + '.', details);
  for (const example of feature.top) {
    const line = element('p', null, details);
    const place = 'row ' + example.row + (example.position === undefined ? '' : ', position ' + example.position);
    element('span', number(example.activation) + '  ' + place + ': ', line, 'state');
    for (const token of example.context || [])
      element(token.here ? 'mark' : 'span', shown(token.text), line).title = 'id ' + token.id;
  }
  const columns = element('div', null, details, 'figures');
  const counts = feature.histogram.counts, edges = feature.histogram.edges;
  const used = counts.map((n, i) => n ? i : -1).filter(i => i !== -1);
  if (used.length) {
    const rows = counts.map((n, i) => [number(edges[i]), n, String(n)]).slice(used[0], used[used.length - 1] + 1);
    bars('Activations, from', rows, element('figure', null, columns));
  }
  bars('Decoder norm by target layer', feature.targets.map(one => [one.layer, one.share, (100 * one.share).toFixed(1) + ' %']),
       element('figure', null, columns));
  const near = element('figure', null, columns);
  element('h3', 'Nearest decoder rows of the layer', near);
  const table = element('table', null, near);
  for (const one of feature.nearest) {
    const line = element('tr', null, table);
    const link = element('a', 'feature ' + one.feature, element('td', null, line));
    link.href = '#details';
    link.onclick = () => show(feature.layer, one.feature);
    element('td', number(one.cosine), line, 'n');
  }
  location.hash = 'details';
  details.scrollIntoView();
}

for (const control of [layer, search, order, dead]) control.oninput = () => { offset = 0; return draw(); };
previous.onclick = () => { offset = Math.max(0, offset - ROWS); return draw(); };
next.onclick = () => { offset += ROWS; return draw(); };
draw();
