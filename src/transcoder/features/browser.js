// SPDX-License-Identifier: Apache-2.0
// The table of features.html and the details of a feature. `data` and `root` come from the page. A feature is
// [layer, index, fired, mean, histogram, shares, nearest [[index, cosine]], examples [[activation, row, position, ids]]].
// Texts are set as text nodes: nothing in them is interpreted.
const LAYER = 0, INDEX = 1, FIRED = 2, MEAN = 3, HISTOGRAM = 4, SHARES = 5, NEAREST = 6, EXAMPLES = 7;
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

function strongest(feature) { return feature[EXAMPLES].length ? feature[EXAMPLES][0][0] : 0; }

function textOf(id) {
  const text = data.texts[id];
  return text === undefined ? '[' + id + ']' : text.replace(/\n/g, '↵').replace(/\t/g, '⇥');
}

const orders = {
  'layer and index': (a, b) => a[LAYER] - b[LAYER] || a[INDEX] - b[INDEX],
  'density, highest first': (a, b) => b[FIRED] - a[FIRED],
  'density, lowest first': (a, b) => a[FIRED] - b[FIRED],
  'strongest activation': (a, b) => strongest(b) - strongest(a),
  'nearest feature': (a, b) => (b[NEAREST].length ? b[NEAREST][0][1] : -1) - (a[NEAREST].length ? a[NEAREST][0][1] : -1),
};

const controls = element('p', null, root);
element('label', 'Layer ', controls);
const layer = element('select', null, controls);
layer.id = 'layer';
element('option', 'all', layer).value = '';
for (let l = 0; l !== data.layers; ++l) element('option', String(l), layer).value = String(l);
element('label', ' Index or text ', controls);
const search = element('input', null, controls);
search.id = 'search';
search.placeholder = '17, 3:17 or a token';
element('label', ' Order ', controls);
const order = element('select', null, controls);
order.id = 'order';
for (const name of Object.keys(orders)) element('option', name, order);
const dead = element('input', null, element('label', ' fired only ', controls));
dead.type = 'checkbox';
dead.checked = true;
const count = element('p', null, root, 'state');
const wide = element('div', null, root, 'wide');
const details = element('div', null, root);
details.id = 'details';

function matches(feature) {
  if (dead.checked && feature[FIRED] === 0) return false;
  if (layer.value !== '' && feature[LAYER] !== Number(layer.value)) return false;
  const wanted = search.value.trim();
  if (wanted === '') return true;
  const both = wanted.match(/^(\d+):(\d+)$/);
  if (both) return feature[LAYER] === Number(both[1]) && feature[INDEX] === Number(both[2]);
  if (/^\d+$/.test(wanted)) return feature[INDEX] === Number(wanted);
  return feature[EXAMPLES].some(example => textOf(example[3][data.context]).includes(wanted));
}

function draw() {
  const found = data.features.filter(matches).sort(orders[order.value]);
  const more = Math.max(0, found.length - ROWS);
  count.textContent = found.length + ' features' + (more ? ', the first ' + ROWS + ' are listed' : '') + '; select one to see its examples';
  wide.textContent = '';
  const table = element('table', null, wide);
  const head = element('tr', null, element('thead', null, table));
  for (const [name, kind] of [['layer', 'n'], ['feature', 'n'], ['density', 'n'], ['mean', 'n'], ['strongest', 'n'], ['tokens', '']])
    element('th', name, head, kind);
  const body = element('tbody', null, table);
  for (const feature of found.slice(0, ROWS)) {
    const row = element('tr', null, body);
    row.style.cursor = 'pointer';
    row.onclick = () => show(feature);
    element('td', feature[LAYER], row, 'n');
    element('a', feature[INDEX], element('td', null, row, 'n')).href = '#details';
    element('td', number(feature[FIRED] / data.tokens), row, 'n');
    element('td', number(feature[MEAN]), row, 'n');
    element('td', number(strongest(feature)), row, 'n');
    const tokens = [...new Set(feature[EXAMPLES].filter(e => e[3].length).map(e => textOf(e[3][data.context])))];
    element('td', tokens.join('  |  '), row);
  }
}

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

function show(feature) {
  details.textContent = '';
  element('h2', 'Layer ' + feature[LAYER] + ', feature ' + feature[INDEX], details);
  element('a', 'back to the list', element('p', null, details)).href = '#application';
  element('p', 'Fired on ' + feature[FIRED] + ' of ' + data.tokens + ' tokens; mean activation ' + number(feature[MEAN]) + '.', details);
  for (const [activation, row, position, ids] of feature[EXAMPLES]) {
    const line = element('p', null, details);
    element('span', number(activation) + '  row ' + row + (position === -1 ? '' : ', position ' + position) + ': ', line, 'state');
    ids.forEach((id, i) => {
      if (id !== -1) element(i === data.context ? 'mark' : 'span', textOf(id), line).title = 'id ' + id;
    });
  }
  const columns = element('div', null, details, 'figures');
  const bins = feature[HISTOGRAM].map((n, i) => [number(data.edges[i]), n, String(n)]);
  const used = bins.map((bin, i) => bin[1] ? i : -1).filter(i => i !== -1);
  if (used.length)
    bars('Activations, from', bins.slice(used[0], used[used.length - 1] + 1), element('figure', null, columns));
  bars('Decoder norm by target layer', feature[SHARES].map((share, i) => [feature[LAYER] + i, share, (100 * share).toFixed(1) + ' %']),
       element('figure', null, columns));
  const near = element('figure', null, columns);
  element('h3', 'Nearest decoder rows of the layer', near);
  const table = element('table', null, near);
  for (const [index, cosine] of feature[NEAREST]) {
    const line = element('tr', null, table);
    const link = element('a', 'feature ' + index, element('td', null, line));
    const other = data.features.find(f => f[LAYER] === feature[LAYER] && f[INDEX] === index);
    if (other) {
      link.href = '#details';
      link.onclick = () => show(other);
    }
    element('td', number(cosine), line, 'n');
  }
  location.hash = 'details';
  details.scrollIntoView();
}

for (const control of [layer, search, order, dead]) control.oninput = draw;
draw();
