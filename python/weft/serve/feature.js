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

function draw_lines(title, examples, strongest, parent) {
  if (examples.length) element('h3', title, parent);
  for (const example of examples) {
    const line = element('p', null, parent);
    const place = 'row ' + example.row + (example.position === undefined ? '' : ', position ' + example.position);
    element('span', number(example.activation) + '  ' + place + ': ', line, 'state');
    for (const token of example.context || []) {
      const shade = token.activation / strongest || 0;
      const text = element(token.here ? 'mark' : 'span', shown(token.text), line);
      text.title = 'id ' + token.id + (shade ? ', activation ' + number(token.activation) : '');
      if (shade && !token.here) text.style.background = 'color-mix(in srgb, var(--blue) ' + Math.round(10 + 35 * shade) + '%, transparent)';
    }
  }
}

function draw_examples(feature, parent) {
  if (feature.scores)
    element('p', 'Scores of the label (0.5 is chance): ' + Object.entries(feature.scores).map(([task, value]) => task + ' ' + number(value)).join(', ') + '.',
            parent);
  element('p', 'Fired on ' + feature.fired + ' of ' + feature.tokens + ' tokens; mean activation ' + number(feature.mean) + '.', parent);
  const strongest = feature.top.length ? feature.top[0].activation : 1;
  draw_lines('Strongest examples', feature.top, strongest, parent);
  draw_lines('Examples at random', feature.sample, strongest, parent);
}

// A table of features with `text` of each. `follow(layer, index)` shows one; without it they are not links.
function draw_features(title, features, text, parent, follow) {
  const holder = element('figure', null, parent);
  element('h3', title, holder);
  const table = element('table', null, holder);
  for (const one of features) {
    const line = element('tr', null, table), cell = element('td', null, line);
    const link = element(follow ? 'button' : 'span', one.layer + ':' + one.feature + (one.label ? ' ' + one.label : ''), cell, follow ? 'link' : '');
    if (follow) link.onclick = () => follow(one.layer, one.feature);
    element('td', text(one), line, 'n');
  }
}

// Histogram, target layers, effects and neighbours.
function draw_figures(feature, parent, follow) {
  const columns = element('div', null, parent, 'figures');
  for (const [title, tokens] of [['Tokens promoted, effect on the logit', feature.raised], ['Tokens suppressed, effect on the logit', feature.lowered]])
    if (tokens) bars(title, tokens.map(one => [shown(one.text), Math.abs(one.effect), number(one.effect)]), element('figure', null, columns));
  const counts = feature.histogram.counts, edges = feature.histogram.edges;
  const used = counts.map((n, i) => n ? i : -1).filter(i => i !== -1);
  if (used.length) {
    const rows = counts.map((n, i) => [number(edges[i]), n, String(n)]).slice(used[0], used[used.length - 1] + 1);
    bars('Activations, from', rows, element('figure', null, columns));
  }
  bars('Decoder norm by target layer', feature.targets.map(one => [one.layer, one.share, (100 * one.share).toFixed(1) + ' %']),
       element('figure', null, columns));
  draw_features('Nearest decoder rows of the layer', feature.nearest, one => number(one.cosine), columns, follow);
  if (feature.coactive && feature.coactive.length)
    draw_features('Features that fire most often at its tokens', feature.coactive,
                  one => (100 * one.part).toFixed(1) + ' %, lift ' + number(one.lift), columns, follow);
  if (feature.downstream && feature.downstream.length)
    draw_features('Features of later layers that it excites most', feature.downstream, one => number(one.effect), columns, follow);
}
