// Controls browsers for the page's test: Chromium over the DevTools protocol, Firefox over WebDriver BiDi.
import { copyFileSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { end, start } from '../../tests/browser/children.mjs';
import { startFirefox } from '../../tests/browser/firefox.mjs';
import { connect } from './socket.mjs';

/** The size of every picture. */
export const [WIDTH, HEIGHT] = [1200, 1400];
const SECONDS = 240; // the time limit of a computation
const FLAGS = ['--headless', '--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--disable-gpu-watchdog',
  '--disable-background-networking', '--disable-component-update', '--disable-sync', '--no-first-run', '--disable-dev-shm-usage',
  '--remote-debugging-pipe', `--window-size=${WIDTH},${HEIGHT}`];

/** The common part: the browser's process, messages and answers, and a page. The browser can read files in the folder `data`. */
class Browser {
  constructor(name, child, data) {
    Object.assign(this, { name, child, data, log: '', last: 0, waiting: new Map(), console: [] });
    child.stderr.on('data', (text) => { this.log = (this.log + text).slice(-4000); });
    child.gone.then(() => this.waiting.forEach(({ bad }) => bad(new Error(`${name} ended\n${this.log}`))));
  }

  /** Sends a message and returns its answer. */
  ask(method, params, more = {}) {
    const id = ++this.last;
    this.write(JSON.stringify({ id, method, params, ...more }));
    return new Promise((good, bad) => this.waiting.set(id, { good, bad }));
  }

  answer(id, result, error) {
    if (!this.waiting.has(id)) return;
    const { good, bad } = this.waiting.get(id);
    this.waiting.delete(id);
    if (error) bad(new Error(error));
    else good(result);
  }

  text(id) {
    return this.evaluate(`document.getElementById('${id}')?.textContent ?? ''`);
  }

  /** Waits until the text of an element matches. */
  async until(id, pattern, seconds = SECONDS) {
    const limit = Date.now() + seconds * 1000;
    for (;;) {
      const text = await this.text(id);
      if (pattern.test(text)) return text;
      const trouble = id === 'trouble' ? '' : await this.text('trouble');
      if (trouble || Date.now() > limit) throw new Error(`#${id} is "${text}", not ${pattern}: ${trouble || `after ${seconds} s`}; ${this.console.join('; ')}`);
      await sleep(100);
    }
  }

  async close() {
    await end(this.child);
    rmSync(this.data, { recursive: true, force: true, maxRetries: 3 });
  }
}

class Chromium extends Browser {
  constructor(program) {
    const data = mkdtempSync(join(tmpdir(), 'browser-'));
    // Remove settings of other drivers, so that it uses its SwiftShader.
    const { VK_DRIVER_FILES, VK_ICD_FILENAMES, ...env } = process.env;
    super('chromium', start(program, [...FLAGS, `--user-data-dir=${data}`, 'about:blank'],
      { stdio: ['ignore', 'ignore', 'pipe', 'pipe', 'pipe'], env }), data);
    let rest = '';
    this.child.stdio[4].on('data', (text) => {
      const messages = (rest + text).split('\0');
      rest = messages.pop();
      messages.forEach((message) => this.hear(JSON.parse(message)));
    });
    this.child.stdio[3].on('error', () => {});
  }

  hear({ id, result, error, method, params }) {
    if (method === 'Runtime.exceptionThrown') this.console.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
    this.answer(id, result, error?.message);
  }

  write(text) {
    this.child.stdio[3].write(`${text}\0`);
  }

  send(method, params = {}) {
    return this.ask(method, params, { sessionId: this.session });
  }

  /** Opens a new page. The script `first` runs before all others. */
  async open(url, first = '') {
    this.session = undefined;
    const { targetId } = await this.send('Target.createTarget', { url: 'about:blank' });
    const { sessionId } = await this.send('Target.attachToTarget', { targetId, flatten: true });
    this.session = sessionId;
    for (const part of ['Page', 'Runtime', 'DOM', 'Accessibility']) await this.send(`${part}.enable`);
    await this.send('Emulation.setDeviceMetricsOverride', { width: WIDTH, height: HEIGHT, deviceScaleFactor: 1, mobile: false });
    await this.scheme('light');
    if (first) await this.send('Page.addScriptToEvaluateOnNewDocument', { source: first });
    await this.send('Page.navigate', { url });
  }

  scheme(value) {
    return this.send('Emulation.setEmulatedMedia', { features: [{ name: 'prefers-color-scheme', value }] });
  }

  async evaluate(expression) {
    const { result, exceptionDetails } = await this.send('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  async key(key) {
    const codes = { Tab: 9, Enter: 13, ArrowRight: 39, ArrowDown: 40, End: 35, Home: 36 };
    const event = { key, code: key, windowsVirtualKeyCode: codes[key], ...(key === 'Enter' ? { text: '\r' } : {}) };
    await this.send('Input.dispatchKeyEvent', { type: 'keyDown', ...event });
    await this.send('Input.dispatchKeyEvent', { type: 'keyUp', ...event });
  }

  point(x, y) {
    return this.send('Input.dispatchMouseEvent', { type: 'mouseMoved', x, y });
  }

  /** Chooses a file for the input `id`. */
  async pick(id, file) {
    const { root } = await this.send('DOM.getDocument');
    const { nodeId } = await this.send('DOM.querySelector', { nodeId: root.nodeId, selector: `#${id}` });
    await this.send('DOM.setFileInputFiles', { nodeId, files: [file] });
  }

  /** Returns a screenshot as bytes of a PNG. */
  async picture() {
    const { data } = await this.send('Page.captureScreenshot', { format: 'png' });
    return Buffer.from(data, 'base64');
  }

  /** Returns role and name of all focusable elements, as screen readers get them. */
  async focusable() {
    const { nodes } = await this.send('Accessibility.getFullAXTree');
    return nodes.filter(({ ignored, properties }) => !ignored && properties?.some(({ name, value }) => name === 'focusable' && value.value))
      .filter(({ role }) => role.value !== 'RootWebArea').map(({ role, name }) => ({ role: role.value, name: name?.value }));
  }

  /** Makes the page lose the GPU. */
  lose() {
    this.send('Browser.crashGpuProcess').catch(() => {});
  }
}

/** Converts a value of WebDriver BiDi to a plain one. */
function plain({ type, value }) {
  if (type === 'number') return Number(value);
  if (type === 'array') return value.map(plain);
  if (type === 'object') return Object.fromEntries(value.map(([key, part]) => [key, plain(part)]));
  return type === 'null' ? null : value;
}

class Firefox extends Browser {
  constructor(runner, parent) {
    const { child, profile } = startFirefox(runner, parent, ['--remote-debugging-port', '0', '--remote-allow-system-access', 'about:blank'],
      { stdio: ['ignore', 'ignore', 'pipe'] });
    super('firefox', child, profile);
  }

  /** Starts the session. Call it before all other methods. */
  async begin() {
    const said = new Promise((good) => {
      this.child.stderr.on('data', () => {
        const address = this.log.match(/WebDriver BiDi listening on (ws:\S+)\s/);
        if (address) good(address[1]);
      });
    });
    const address = await Promise.race([said, this.child.gone.then(() => null), sleep(60_000, null, { ref: false })]);
    if (!address) throw new Error(`no WebDriver BiDi\n${this.log}`);
    this.write = await connect(`${address}/session`, (text) => this.hear(JSON.parse(text)));
    await this.ask('session.new', { capabilities: {} });
    await this.ask('session.subscribe', { events: ['log.entryAdded'] });
    const { contexts } = await this.ask('browsingContext.getTree', { 'moz:scope': 'chrome' });
    this.window = contexts[0].context;
  }

  hear({ id, type, result, message, method, params }) {
    if (method === 'log.entryAdded' && params.type === 'javascript' && params.level === 'error') this.console.push(params.text);
    this.answer(id, result, type === 'error' ? message : undefined);
  }

  async open(url, first = '') {
    const before = this.page;
    this.page = (await this.ask('browsingContext.create', { type: 'tab' })).context;
    if (before) await this.ask('browsingContext.close', { context: before });
    await this.ask('browsingContext.setViewport', { context: this.page, viewport: { width: WIDTH, height: HEIGHT }, devicePixelRatio: 1 });
    await this.scheme('light');
    if (first) await this.ask('script.addPreloadScript', { functionDeclaration: `() => { ${first} }`, contexts: [this.page] });
    await this.ask('browsingContext.navigate', { context: this.page, url, wait: 'complete' });
  }

  async evaluateIn(context, expression) {
    const { result, exceptionDetails } = await this.ask('script.evaluate',
      { expression, target: { context }, awaitPromise: true, resultOwnership: 'none' });
    if (exceptionDetails) throw new Error(exceptionDetails.text);
    return result;
  }

  async evaluate(expression) {
    return plain(await this.evaluateIn(this.page, expression));
  }

  scheme(value) {
    return this.evaluateIn(this.window, `gBrowser.selectedBrowser.browsingContext.prefersColorSchemeOverride = '${value}'`);
  }

  act(source, actions) {
    return this.ask('input.performActions', { context: this.page, actions: [{ ...source, id: source.type, actions }] });
  }

  key(key) {
    const value = { Tab: '\uE004', Enter: '\uE007', ArrowRight: '\uE014', ArrowDown: '\uE015', End: '\uE010', Home: '\uE011' }[key];
    return this.act({ type: 'key' }, [{ type: 'keyDown', value }, { type: 'keyUp', value }]);
  }

  point(x, y) {
    return this.act({ type: 'pointer' }, [{ type: 'pointerMove', x: Math.round(x), y: Math.round(y) }]);
  }

  async pick(id, file) {
    // The browser's sandbox can only read files in its folder.
    const copy = join(this.data, basename(file));
    if (copy !== file) copyFileSync(file, copy);
    const { sharedId } = await this.evaluateIn(this.page, `document.getElementById('${id}')`);
    await this.ask('input.setFiles', { context: this.page, element: { sharedId }, files: [copy] });
  }

  async picture() {
    const { data } = await this.ask('browsingContext.captureScreenshot', { context: this.page, origin: 'viewport' });
    return Buffer.from(data, 'base64');
  }

  async focusable() {
    const all = plain(await this.evaluateIn(this.window, `(async () => {
      const service = Cc['@mozilla.org/accessibilityService;1'].getService(Ci.nsIAccessibilityService);
      const walk = (it) => {
        const state = {};
        it.getState(state, {});
        const own = { role: service.getStringRole(it.role), name: it.name, focusable: Boolean(state.value & Ci.nsIAccessibleStates.STATE_FOCUSABLE) };
        const parts = [];
        for (let part = it.firstChild; part; part = part.nextSibling) parts.push(...walk(part));
        return [own, ...parts];
      };
      // The page's process sends the tree after the service has started.
      let before = -1;
      for (let n = 0; n < 50; n++) {
        const top = service.getAccessibleFor(gBrowser.selectedBrowser);
        const all = top ? walk(top) : [];
        if (all.length > 2 && all.length === before) return all;
        before = all.length;
        await new Promise((done) => setTimeout(done, 200));
      }
      return [];
    })()`));
    return all.filter(({ role, focusable }) => focusable && !['internal frame', 'document'].includes(role));
  }
}

/** Starts the browser `name`. It can read files in `parent`. */
export async function started(name, path, parent) {
  if (name === 'chromium') return new Chromium(path);
  const browser = new Firefox(path, parent);
  try {
    await browser.begin();
  } catch (e) {
    await browser.close();
    throw e;
  }
  return browser;
}
