// SPDX-License-Identifier: Apache-2.0
// What the pages of features and of graphs share: elements, numbers, the answers of the server, and the details of a feature.
// Texts are set as text nodes: nothing in them is interpreted.
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

async function requested(path, values) {
  const answer = await fetch(path + '?' + new URLSearchParams(values));
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
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

function draw_examples(feature, parent) {
  element('p', 'Fired on ' + feature.fired + ' of ' + feature.tokens + ' tokens; mean activation ' + number(feature.mean) + '.', parent);
  for (const example of feature.top) {
    const line = element('p', null, parent);
    const place = 'row ' + example.row + (example.position === undefined ? '' : ', position ' + example.position);
    element('span', number(example.activation) + '  ' + place + ': ', line, 'state');
    for (const token of example.context || [])
      element(token.here ? 'mark' : 'span', shown(token.text), line).title = 'id ' + token.id;
  }
}

// Histogram, target layers and neighbours. `follow(layer, index)` shows another feature; without it they are not links.
function draw_figures(feature, parent, follow) {
  const columns = element('div', null, parent, 'figures');
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
    const line = element('tr', null, table), cell = element('td', null, line);
    if (follow) {
      const link = element('button', 'feature ' + one.feature, cell, 'link');
      link.onclick = () => follow(feature.layer, one.feature);
    } else {
      cell.textContent = 'feature ' + one.feature;
    }
    element('td', number(one.cosine), line, 'n');
  }
}
