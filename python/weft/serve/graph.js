// SPDX-License-Identifier: Apache-2.0
// An attribution graph as a picture whose nodes are moved, pinned, grouped and labelled; needs feature.js. `data` and `root` come from the
// page: `data.graph` (metadata, qParams, nodes, tokens, links as [source, target, weight]), `kinds`, `names`, `features` (of each node
// "LAYER:INDEX" or null), `strength`, `shares` (of each link), `layout`, and in an exported page `details`, features by "LAYER:INDEX".
const SVG = 'http://www.w3.org/2000/svg';
const MOST_LINKS = 200, MOST_OF_NODE = 300, MOST_LISTED = 100, MOST_LISTED_LINKS = 12, FIRST_SHOWN = 400;

const {nodes, links} = data.graph, {layout, kinds, shares} = data;
const numbers = new Map(nodes.map((node, i) => [node.node_id, i]));
const inputs = nodes.map(() => []), outputs = nodes.map(() => []);
links.forEach(([source, target], i) => { inputs[target].push(i); outputs[source].push(i); });
const strongest_links = shares.map((_, i) => i).sort((a, b) => shares[b] - shares[a]);
const strongest_nodes = nodes.map((_, i) => i).sort((a, b) => data.strength[b] - data.strength[a]);
const always = i => kinds[i] === 'token' || kinds[i] === 'logit';
const others = strongest_nodes.filter(i => !always(i));

// What a person has set; it is stored in the fields that the viewers of graphs know: pinnedIds, supernodes, clerp. Their sg_pos, a text, has
// places here: NODE x y …; a text of another form is another program's.
const pinned = new Set((data.graph.qParams.pinnedIds || []).filter(id => numbers.has(id)).map(id => numbers.get(id)));
const groups = (data.graph.qParams.supernodes || []).filter(Array.isArray)
    .map(([name, ...ids]) => ({name: String(name), members: ids.filter(id => numbers.has(id)).map(id => numbers.get(id))}))
    .filter(group => group.members.length);
const places = nodes.map((_, i) => layout.places[i].slice());
const words = String(data.graph.qParams.sg_pos || '').split(' ');
for (let i = 0; i + 2 < words.length; i += 3)
  if (numbers.has(words[i]) && words[i + 1] !== '' && words[i + 2] !== '' && isFinite(words[i + 1]) && isFinite(words[i + 2]))
    place(numbers.get(words[i]), [Number(words[i + 1]), Number(words[i + 2])]);
let n_shown = Math.min(others.length, FIRST_SHOWN), only_pinned = false, zoom = 1, selected = null, focused = null, changed = false;

function place(i, [x, y]) {
  places[i] = [Math.min(Math.max(x, 8), layout.width - 8), Math.min(Math.max(y, 8), layout.height - 8)];
}

// --- Units: a node, or a group that is drawn as one ---

let units = [], unit_of = [];

function make_units() {
  const shown_nodes = new Set(only_pinned ? [] : others.slice(0, n_shown));
  nodes.forEach((_, i) => { if (always(i) || pinned.has(i)) shown_nodes.add(i); });
  if (selected !== null) shown_nodes.add(selected);
  unit_of = nodes.map(() => null);
  units = [];
  for (const group of groups) {
    const unit = {group, members: group.members};
    for (const i of group.members) unit_of[i] = unit;
    units.push(unit);
  }
  for (const i of [...shown_nodes].sort((a, b) => a - b)) {
    if (unit_of[i]) continue;
    unit_of[i] = {members: [i]};
    units.push(unit_of[i]);
  }
}

function centre(unit) { return places[unit.members[0]]; }

function name_of(i) { return nodes[i].clerp || data.names[i]; }

function kind_of(unit) { return unit.group ? 'group' : kinds[unit.members[0]]; }

function label(unit) { return unit.group ? unit.group.name + ' (' + unit.members.length + ')' : name_of(unit.members[0]); }

function where(i) {
  const token = nodes[i].ctx_idx;
  return {feature: 'feature ' + data.features[i], error: 'error', token: 'token', logit: 'output'}[kinds[i]] || 'node ' + nodes[i].node_id;
}

function described(unit) {
  if (unit.group) return 'group ' + label(unit);
  const i = unit.members[0];
  return where(i) + ', ' + (kinds[i] === 'token' || kinds[i] === 'logit' ? '' : data.rows[i] + ', ') + 'at token ' + nodes[i].ctx_idx + ' "' +
      data.graph.tokens[nodes[i].ctx_idx] + '": ' + name_of(i) + (pinned.has(i) ? ', pinned' : '');
}

// Sums of the links between units, strongest first: [{source, target, weight, share}].
function merged(numbers_of_links, most) {
  const found = new Map();
  for (const i of numbers_of_links) {
    const source = unit_of[links[i][0]], target = unit_of[links[i][1]];
    if (!source || !target || source === target) continue;
    if (!found.has(target)) found.set(target, new Map());
    const of_target = found.get(target);
    if (!of_target.has(source)) of_target.set(source, {source, target, weight: 0, share: 0});
    const edge = of_target.get(source);
    edge.weight += links[i][2];
    edge.share += shares[i] / target.members.length;
  }
  return [...found.values()].flatMap(one => [...one.values()]).sort((a, b) => b.share - a.share).slice(0, most);
}

function links_of(unit) { return unit.members.flatMap(i => [...inputs[i], ...outputs[i]]); }

function visible_links() {
  if (selected !== null) return merged(links_of(unit_of[selected]), MOST_OF_NODE);
  const chosen = [];
  for (const i of strongest_links) {
    const [source, target] = [unit_of[links[i][0]], unit_of[links[i][1]]];
    if (source && target && source !== target) chosen.push(i);
    if (chosen.length === 4 * MOST_LINKS) break;
  }
  return merged(chosen, MOST_LINKS);
}

// --- The controls ---

const controls = element('p', null, root, 'controls');
const slider_label = element('label', 'Nodes ', controls);
const slider = element('input', null, slider_label);
slider.type = 'range';
slider.min = 0;
slider.max = others.length;
slider.value = n_shown;
const slider_text = element('span', null, slider_label);
const pinned_label = element('label', null, controls);
const pinned_box = element('input', null, pinned_label);
pinned_box.type = 'checkbox';
element('span', 'pinned and groups only', pinned_label);
function button(text, parent, act, title) {
  const made = element('button', text, parent);
  made.type = 'button';
  made.onclick = act;
  if (title) made.title = title;
  return made;
}
button('−', controls, () => resize(zoom / 1.25), 'smaller').setAttribute('aria-label', 'smaller');
button('+', controls, () => resize(zoom * 1.25), 'larger').setAttribute('aria-label', 'larger');
button('Reset places', controls, () => { nodes.forEach((_, i) => place(i, layout.places[i])); touch(); draw(); });
button('Save picture', controls, save_picture, 'SVG');
button('Save graph', controls, save_graph, 'JSON with pins, groups, labels and places; weft serve shows it again');
element('p', 'Select a node to see what it reads and writes; drag it to move it. By keyboard: arrows go from node to node, with Shift they ' +
        'move it, Enter selects, P pins, G groups, L labels, Escape ends the selection.', root, 'state');
const said = element('p', null, root, 'state');
said.setAttribute('role', 'status');
const split = element('div', null, root, 'split');
const frame = element('div', null, split, 'graph');
const panel = element('div', null, split);
panel.id = 'details';

function touch() { changed = true; }

// --- The picture ---

function drawn(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

const svg = drawn('svg', {viewBox: '0 0 ' + layout.width + ' ' + layout.height, role: 'group', class: 'graph',
                          'aria-label': 'attribution graph; arrow keys go from node to node'}, frame);
const scenery = drawn('g', {}, svg), edge_layer = drawn('g', {}, svg), unit_layer = drawn('g', {}, svg);
let edges = [];

function short(text, most) { text = shown(text).trim(); return text.length > most ? text.slice(0, most - 1) + '…' : text; }

function draw_scenery() {
  for (const [row, y, bottom] of layout.rows) {
    drawn('text', {x: 4, y: y + 4, class: 'row'}, scenery, row);
    drawn('line', {x1: 0, x2: layout.width, y1: bottom, y2: bottom, class: 'rule'}, scenery);
  }
  layout.columns.forEach(([x, width], token) =>
    drawn('text', {x: x + width / 2, y: layout.height - 6, class: 'token'}, scenery, short(data.graph.tokens[token], Math.floor(width / 7))));
}

const shapes = {
  feature: () => ['circle', {r: 6}],
  error: () => ['path', {d: 'M0 -6L6 0L0 6L-6 0Z'}],
  token: () => ['rect', {x: -6, y: -6, width: 12, height: 12}],
  logit: () => ['rect', {x: -6, y: -6, width: 12, height: 12}],
  group: () => ['rect', {x: -14, y: -8, width: 28, height: 16, rx: 5}],
  other: () => ['path', {d: 'M0 -6L6 5L-6 5Z'}],
};

function draw_edges() {
  edge_layer.textContent = '';
  edges = visible_links();
  for (const edge of edges) {
    edge.line = drawn('path', {class: edge.weight < 0 ? 'edge negative' : 'edge', 'stroke-width': (0.6 + 4 * Math.sqrt(edge.share)).toFixed(2),
                               'stroke-opacity': Math.min(0.9, 0.15 + Math.sqrt(edge.share)).toFixed(2)}, edge_layer);
    drawn('title', {}, edge.line, label(edge.source) + ' → ' + label(edge.target) + ': ' + number(edge.weight));
    bend(edge);
  }
}

function bend({source, target, line}) {
  const [x, y] = centre(source), [u, v] = centre(target);
  line.setAttribute('d', 'M' + x + ' ' + y + 'C' + x + ' ' + (y + v) / 2 + ' ' + u + ' ' + (y + v) / 2 + ' ' + u + ' ' + v);
}

function draw() {
  make_units();
  slider_text.textContent = ' ' + n_shown + ' of ' + others.length + ' ';
  if (!units.length) return;
  if (focused === null || !unit_of[focused]) focused = selected !== null ? selected : units[units.length - 1].members[0];
  const had_focus = unit_layer.contains(document.activeElement);
  unit_layer.textContent = '';
  const near = new Set();
  draw_edges();
  if (selected !== null) for (const edge of edges) near.add(edge.source).add(edge.target);
  for (const unit of units) {
    const i = unit.members[0], [x, y] = centre(unit), kind = kind_of(unit), is_selected = selected !== null && unit_of[selected] === unit;
    const is_pinned = unit.group || pinned.has(i);
    unit.mark = drawn('g', {class: 'node ' + kind + (is_selected ? ' selected' : '') + (is_pinned ? ' pinned' : '') +
                            (selected !== null && !is_selected && !near.has(unit) ? ' far' : ''), transform: 'translate(' + x + ' ' + y + ')',
                            role: 'button', tabindex: unit_of[focused] === unit ? 0 : -1, 'aria-label': described(unit),
                            'aria-pressed': is_selected}, unit_layer);
    drawn('title', {}, unit.mark, described(unit));
    const [name, attributes] = shapes[kind]();
    drawn(name, {...attributes, class: 'shape'}, unit.mark);
    if (kind === 'logit') drawn('text', {y: 20, class: 'name middle'}, unit.mark, short(data.names[i], 14));
    else if (is_pinned || is_selected) drawn('text', {x: unit.group ? 18 : 10, y: 4, class: 'name'}, unit.mark, short(label(unit), 32));
    attach(unit);
  }
  if (had_focus) unit_of[focused].mark.focus({preventScroll: true});
}

function move(unit, dx, dy) {
  const [x, y] = centre(unit);
  place(unit.members[0], [x + dx, y + dy]);
  const [u, v] = centre(unit);
  unit.mark.setAttribute('transform', 'translate(' + u + ' ' + v + ')');
  for (const edge of edges) if (edge.source === unit || edge.target === unit) bend(edge);
  touch();
}

function attach(unit) {
  let from = null, moved = false;
  const mark = unit.mark;
  mark.onpointerdown = event => {
    if (event.button !== 0) return;
    from = [event.clientX, event.clientY];
    moved = false;
    mark.setPointerCapture(event.pointerId);
  };
  mark.onpointermove = event => {
    if (!from) return;
    const dx = event.clientX - from[0], dy = event.clientY - from[1];
    if (!moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    const scale = layout.width / svg.getBoundingClientRect().width;
    move(unit, dx * scale, dy * scale);
    from = [event.clientX, event.clientY];
    moved = true;
  };
  mark.onpointerup = () => {
    if (from && !moved) select(unit.members[0]);
    from = null;
  };
  mark.onpointercancel = () => { from = null; };
  mark.onclick = event => { if (event.detail === 0) select(unit.members[0]); };   // of a screen reader: without a pointer
}

const steps = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

function neighbour(unit, [dx, dy]) {
  const [x, y] = centre(unit);
  let best = null, least = Infinity;
  for (const other of units) {
    if (other === unit) continue;
    const [u, v] = centre(other), along = (u - x) * dx + (v - y) * dy, across = Math.abs((u - x) * dy) + Math.abs((v - y) * dx);
    if (along > 0.5 && along + 3 * across < least) [best, least] = [other, along + 3 * across];
  }
  return best;
}

svg.onkeydown = event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const unit = focused === null ? null : unit_of[focused];
  if (!unit) return;
  if (steps[event.key]) {
    if (event.shiftKey) {
      move(unit, 10 * steps[event.key][0], 10 * steps[event.key][1]);
    } else {
      const next = neighbour(unit, steps[event.key]);
      if (next) {
        unit.mark.setAttribute('tabindex', -1);
        focused = next.members[0];
        next.mark.setAttribute('tabindex', 0);
        next.mark.focus();
      }
    }
  } else if (event.key === 'Enter' || event.key === ' ') {
    select(unit.members[0]);
  } else if (event.key === 'Escape') {
    select(null);
  } else if ('pgl'.includes(event.key.toLowerCase()) && event.key.length === 1) {
    const key = event.key.toLowerCase();
    if (key === 'p') {
      if (!unit.group) pin(unit.members[0]);
    } else {
      select(unit.members[0]);
      const field = document.getElementById(key === 'g' ? 'group' : 'label');
      if (field) field.focus();
    }
  } else {
    return;
  }
  event.preventDefault();
};
svg.addEventListener('focusin', event => {
  const unit = units.find(one => one.mark === event.target);
  if (unit) focused = unit.members[0];
});
// A node that was selected has been drawn anew before the click arrives: what was under the pointer when it was pressed counts.
let on_background = false;
svg.onpointerdown = event => { on_background = !unit_layer.contains(event.target); };
svg.onclick = () => { if (on_background && selected !== null) select(null); };

function resize(factor) {
  zoom = Math.min(Math.max(factor, 0.2), 5);
  svg.style.width = Math.round(layout.width * zoom) + 'px';
}

// --- What a person does ---

function select(i) {
  selected = i;
  if (i !== null) focused = i;
  draw();
  draw_panel();
  said.textContent = i === null ? '' : described(unit_of[i]) + ' is selected';
}

function pin(i) {
  if (!pinned.delete(i)) pinned.add(i);
  touch();
  draw();
  if (selected !== null) draw_panel();
  said.textContent = where(i) + (pinned.has(i) ? ' is pinned' : ' is not pinned any more');
}

// Into the group of this name, which is made if there is none; out of its group with an empty name.
function put_into(i, name) {
  for (const group of groups) group.members = group.members.filter(one => one !== i);
  groups.splice(0, groups.length, ...groups.filter(group => group.members.length));
  if (name) {
    const group = groups.find(one => one.name === name);
    if (group) group.members.push(i);
    else groups.push({name, members: [i]});
  }
  touch();
  select(i);
}

function field(title, id, value, parent, act) {
  const holder = element('label', title + ' ', parent), made = element('input', null, holder);
  made.id = id;
  made.value = value;
  made.maxLength = 200;
  made.onchange = () => act(made.value.trim());
  return made;
}

let asked = 0;

function draw_panel() {
  panel.textContent = '';
  ++asked;
  if (selected === null) return;
  const i = selected, unit = unit_of[i], node = nodes[i];
  element('h2', unit.group ? 'Group ' + unit.group.name : where(i) + ' at token ' + node.ctx_idx + ' “' + shown(data.graph.tokens[node.ctx_idx]) + '”', panel);
  const tools = element('p', null, panel, 'controls');
  if (unit.group) {
    field('Name', 'label', unit.group.name, tools, value => {
      if (value) unit.group.name = value;
      touch();
      select(i);
    });
    button('Dissolve group', tools, () => { groups.splice(groups.indexOf(unit.group), 1); touch(); select(i); });
    const list = element('ul', null, panel);
    for (const one of unit.members) {
      const line = element('li', where(one) + ': ' + shown(name_of(one)) + ' ', list);
      button('take out', line, () => put_into(one, ''));
    }
  } else {
    button(pinned.has(i) ? 'Unpin' : 'Pin', tools, () => pin(i));
    field('Label', 'label', node.clerp || '', tools, value => { node.clerp = value; touch(); select(i); });
    field('Group', 'group', '', tools, value => put_into(i, value)).setAttribute('list', 'groups');
    const names = element('datalist', null, tools);
    names.id = 'groups';
    for (const group of groups) element('option', null, names).value = group.name;
    const facts = [];
    if (typeof node.activation === 'number') facts.push('activation ' + number(node.activation));
    if (kinds[i] === 'logit' && typeof node.token_prob === 'number') facts.push('probability ' + number(node.token_prob));
    facts.push('number ' + (strongest_nodes.indexOf(i) + 1) + ' of ' + nodes.length + ' by influence');
    element('p', facts.join('; '), panel);
  }
  const examples = element('div', null, panel), columns = element('div', null, panel, 'figures'), figures = element('div', null, panel);
  const members = new Set(unit.members);
  list_links('Reads', unit.members.flatMap(one => inputs[one]).filter(l => !members.has(links[l][0])), 0, columns);
  list_links('Writes to', unit.members.flatMap(one => outputs[one]).filter(l => !members.has(links[l][1])), 1, columns);
  if (!unit.group && data.features[i]) show_feature(data.features[i], examples, figures);
}

function list_links(title, chosen, end, parent) {
  const holder = element('figure', null, parent);
  element('h3', title, holder);
  if (!chosen.length) element('p', 'nothing', holder, 'missing');
  const table = element('table', null, holder);
  chosen.sort((a, b) => Math.abs(links[b][2]) - Math.abs(links[a][2]));
  for (const l of chosen.slice(0, MOST_LISTED_LINKS)) {
    const other = links[l][end], line = element('tr', null, table);
    element('td', number(links[l][2]), line, 'n');
    const to = element('button', short(name_of(other), 40), element('td', null, line), 'link');
    to.type = 'button';
    to.onclick = () => select(other);
    element('td', where(other) + ', token ' + nodes[other].ctx_idx, line);
  }
  if (chosen.length > MOST_LISTED_LINKS) element('p', (chosen.length - MOST_LISTED_LINKS) + ' weaker ones are not listed', holder, 'state');
}

async function show_feature(name, parent, figures) {
  const mine = asked;
  if (!data.facts) {
    element('p', 'What the feature responds to: weft serve with the directory of weft features as well.', parent, 'missing');
    return;
  }
  let feature = data.details ? data.details[name] : null;
  try {
    const [layer, index] = name.split(':');
    if (!data.details) feature = await requested('feature', {layer, feature: index});
  } catch (failure) {
    feature = null;
    if (mine === asked) element('p', String(failure.message || failure), parent, 'bad');
    return;
  }
  if (mine !== asked) return;     // another node has been selected meanwhile
  if (feature) {
    draw_examples(feature, parent);
    draw_figures(feature, figures, null);
  } else {
    element('p', 'The details of this feature are not in the page.', parent, 'missing');
  }
}

// --- A list of the nodes, which can be searched ---

const finder = element('div', null, root);
element('h2', 'Nodes', finder);
const search = element('input', null, element('label', 'Label, feature or token ', finder));
search.id = 'search';
search.placeholder = '12:403 or a text';
const count = element('p', null, finder, 'state');
const table = element('table', null, element('div', null, finder, 'wide'));

function list() {
  const text = search.value.trim().toLowerCase();
  const found = strongest_nodes.filter(i => text === '' || data.features[i] === text || name_of(i).toLowerCase().includes(text) ||
      data.graph.tokens[nodes[i].ctx_idx].toLowerCase().includes(text));
  count.textContent = found.length + ' nodes, strongest first' + (found.length > MOST_LISTED ? '; ' + MOST_LISTED + ' are listed' : '');
  table.textContent = '';
  const head = element('tr', null, element('thead', null, table));
  for (const name of ['node', 'kind', 'row', 'token', 'influence']) element('th', name, head, name === 'influence' ? 'n' : '');
  const body = element('tbody', null, table);
  for (const i of found.slice(0, MOST_LISTED)) {
    const line = element('tr', null, body), to = element('button', short(name_of(i), 60), element('td', null, line), 'link');
    to.type = 'button';
    to.onclick = () => { select(i); frame.scrollIntoView(); };
    for (const text of [where(i), data.rows[i], nodes[i].ctx_idx + ' ' + shown(data.graph.tokens[nodes[i].ctx_idx])]) element('td', text, line);
    element('td', number(data.strength[i]), line, 'n');
  }
}

// --- Files ---

function download(content, type, name) {
  const link = document.createElement('a'), address = URL.createObjectURL(new Blob([content], {type}));
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function save_picture() {
  const copy = svg.cloneNode(true);
  copy.setAttribute('width', layout.width);
  copy.setAttribute('height', layout.height);
  copy.removeAttribute('style');
  copy.insertBefore(drawn('style', {}, null, document.querySelector('style').textContent), copy.firstChild);
  download(new XMLSerializer().serializeToString(copy), 'image/svg+xml', data.file + '.svg');
}

function save_graph() {
  const moved = nodes.flatMap((node, i) => places[i][0] === layout.places[i][0] && places[i][1] === layout.places[i][1] ? [] :
      [node.node_id + ' ' + Math.round(places[i][0]) + ' ' + Math.round(places[i][1])]);
  const graph = {
    metadata: data.graph.metadata,
    qParams: {...data.graph.qParams, pinnedIds: [...pinned].map(i => nodes[i].node_id),
              supernodes: groups.map(group => [group.name, ...group.members.map(i => nodes[i].node_id)]), sg_pos: moved.join(' ')},
    nodes,
    links: links.map(([source, target, weight]) => ({source: nodes[source].node_id, target: nodes[target].node_id, weight})),
  };
  download(JSON.stringify(graph), 'application/json', data.file + '.json');
  changed = false;
}

slider.oninput = () => { n_shown = Number(slider.value); draw(); };
pinned_box.onchange = () => { only_pinned = pinned_box.checked; draw(); };
search.oninput = list;
window.onbeforeunload = event => { if (changed) event.preventDefault(); };     // pins, groups and labels that are not saved
draw_scenery();
resize(Math.min(1, Math.max(0.7, frame.clientWidth / layout.width)));
draw();
list();
