// SPDX-License-Identifier: Apache-2.0
// The table of features and the details of one; needs feature.js. `data` and `root` come from the page: `data.facts`, and in an exported
// page `data.features`, a list of {row, details}. Without it, rows and details are requested from the server that sent the page.
const ROWS = 200;

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
  return row.tokens.some(text => text.includes(query.search)) || (row.label || '').toLowerCase().includes(query.search.toLowerCase());
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

const served = {
  select: query => requested('features', query),
  details: (layer, feature) => requested('feature', {layer, feature}),
};

const source = data.features ? embedded : served;

// --- The table ---

const controls = element('p', null, root);
const layer = element('select', null, element('label', 'Layer ', controls));
layer.id = 'layer';
element('option', 'all', layer).value = '';
for (let l = 0; l !== data.facts.layers; ++l) element('option', String(l), layer).value = String(l);
const search = element('input', null, element('label', ' Index or text ', controls));
search.id = 'search';
search.placeholder = data.facts.labelled ? '17, 3:17, a token or a label' : '17, 3:17 or a token';
const order = element('select', null, element('label', ' Order ', controls));
order.id = 'order';
for (const name of data.facts.orders) element('option', name, order).value = name;
order.value = 'density, highest first';
const dead = element('input', null, element('label', ' fired only ', controls));
dead.type = 'checkbox';
dead.checked = true;
const count = element('p', null, root, 'state');
count.setAttribute('role', 'status');
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
  for (const [name, kind] of [['layer', 'n'], ['feature', 'n'], ['density', 'n'], ['mean', 'n'], ['strongest', 'n'],
                              ...(data.facts.labelled ? [['label', '']] : []), ['tokens', '']])
    element('th', name, head, kind);
  const body = element('tbody', null, table);
  for (const one of found.rows) {
    const row = element('tr', null, body);
    row.style.cursor = 'pointer';
    row.onclick = () => show(one.layer, one.feature);
    element('td', one.layer, row, 'n');
    element('a', one.feature, element('td', null, row, 'n')).href = '#details';     // by keyboard: a click on it reaches the row
    element('td', number(one.fired / data.facts.tokens), row, 'n');
    element('td', number(one.mean), row, 'n');
    element('td', number(one.strongest), row, 'n');
    if (data.facts.labelled) element('td', one.label, row);
    element('td', one.tokens.map(shown).join('  |  '), row);
  }
}

// --- A feature ---

async function show(ofLayer, index) {
  let feature;
  try {
    feature = await source.details(ofLayer, index);
  } catch (failure) {
    details.textContent = String(failure.message || failure);
    return;
  }
  details.textContent = '';
  if (!feature) {
    element('p', 'Layer ' + ofLayer + ', feature ' + index + ' is not in this page.', details, 'missing');
    return;
  }
  const heading = element('h2', 'Layer ' + feature.layer + ', feature ' + feature.feature + (feature.label ? ': ' + feature.label : ''), details);
  heading.tabIndex = -1;
  element('a', 'back to the list', element('p', null, details)).href = '#application';
  draw_examples(feature, details);
  draw_figures(feature, details, show);
  location.hash = 'details';
  details.scrollIntoView();
  heading.focus();
}

for (const control of [layer, search, order, dead]) control.oninput = () => { offset = 0; return draw(); };
previous.onclick = () => { offset = Math.max(0, offset - ROWS); return draw(); };
next.onclick = () => { offset += ROWS; return draw(); };
draw();
