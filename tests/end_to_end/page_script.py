# SPDX-License-Identifier: Apache-2.0
"""The script of a page on a minimal document, in node; it is not checked where node is not installed."""
import json
import re
import shutil
import subprocess

DOCUMENT = """
class Element {
  constructor(name) { this.name = name; this.children = []; this.style = {}; this.own = ''; this.attributes = {}; }
  appendChild(child) { this.children.push(child); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  contains() { return false; }
  get value() { return this.chosen ?? (this.name === 'select' ? this.children[0].value : this.own); }
  set value(text) { this.chosen = text; }
  set textContent(text) { this.own = String(text); this.children = []; }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(''); }
  all(name) { return [...(this.name === name ? [this] : []), ...this.children.flatMap(child => child.all(name))]; }
  scrollIntoView() {}
  focus() {}
}
const application = new Element('div'), source = new Element('script');
source.textContent = %(data)s;
globalThis.location = {};
globalThis.window = {};
globalThis.document = {createElement: name => new Element(name), createElementNS: (_, name) => new Element(name),
                       getElementById: id => id === 'data' ? source : application};
const send = globalThis.fetch;
globalThis.fetch = path => send('http://127.0.0.1:%(port)s/' + path);
%(script)s
const need = (condition, what) => { if (!condition) throw new Error(what + ': ' + application.textContent.slice(0, 3000)); };
(async () => {
%(checks)s
})().catch(failure => { console.error(failure); process.exit(1); });
"""


def run(folder, text, port, checks):
    """text: the page; port: of its server, if it has one; checks: statements that call need(condition, what)."""
    if not shutil.which("node"):
        print("not checked: the script of the page (node is not installed)")
        return
    path = folder / "page.js"
    path.write_text(DOCUMENT % {"data": json.dumps(re.search(r'id="data">(.*?)</script>', text, re.S)[1]), "port": port, "checks": checks,
                                "script": re.search(r"<script>(.*?)</script>", text, re.S)[1]})
    done = subprocess.run(["node", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
