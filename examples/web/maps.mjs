// Draws a head's weights, and selects a pair of tokens with the pointer or the keyboard.

const SIDE = 240; // the largest side in CSS pixels

/** The rows of `weights`, [n, n], of `layer` and `head`. */
export const mapOf = ({ weights, n }, heads, layer, head) => {
  const size = n * n;
  return weights.subarray((layer * heads + head) * size).subarray(0, size);
};

function color(name) {
  const [r, g, b] = getComputedStyle(document.documentElement).getPropertyValue(name).trim().match(/[\da-f]{2}/gi);
  return [r, g, b].map((part) => parseInt(part, 16));
}

/** Draws a map of `n` tokens, with a frame around the pair [query, key]. The shade is the square root of the weight. */
export function draw(canvas, map, n, pair) {
  const scale = devicePixelRatio || 1;
  canvas.width = canvas.height = Math.round(SIDE * scale);
  const [low, high] = [color('--map-low'), color('--map-high')];
  const small = new OffscreenCanvas(n, n);
  const image = new ImageData(n, n);
  map.forEach((weight, at) => {
    const share = Math.sqrt(Math.min(Math.max(weight, 0), 1));
    for (let c = 0; c < 3; c++) image.data[4 * at + c] = low[c] + share * (high[c] - low[c]);
    image.data[4 * at + 3] = 255;
  });
  small.getContext('2d').putImageData(image, 0, 0);
  const context = canvas.getContext('2d');
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  if (!pair) return;
  const cell = canvas.width / n;
  context.lineWidth = Math.max(2 * scale, 2);
  context.strokeStyle = `rgb(${color('--map-mark')})`;
  context.strokeRect(pair[1] * cell, pair[0] * cell, cell, cell);
}

/** Calls `point` with [query, key] on movements of the pointer and on arrow keys, Home, End, Page Up and Page Down. `of` returns the number of tokens and the pair. */
export function pointing(canvas, of, point) {
  canvas.addEventListener('pointermove', (event) => {
    const { n } = of();
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const within = (x) => Math.min(Math.max(Math.floor(x * n), 0), n - 1);
    point([within((event.clientY - top) / height), within((event.clientX - left) / width)]);
  });
  canvas.addEventListener('focus', () => point(of().pair ?? [0, 0]));
  canvas.addEventListener('keydown', (event) => {
    const { n, pair } = of();
    const [query, key] = pair ?? [0, 0];
    const to = {
      ArrowUp: [query - 1, key], ArrowDown: [query + 1, key], ArrowLeft: [query, key - 1], ArrowRight: [query, key + 1],
      Home: [query, 0], End: [query, n - 1], PageUp: [0, key], PageDown: [n - 1, key],
    }[event.key];
    if (!to || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    point(to.map((at) => Math.min(Math.max(at, 0), n - 1)));
  });
}
