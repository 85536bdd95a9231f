// Bytes of files, from the server or the user, with progress.

/** The bytes of a stream of `size` bytes, or of unknown size if that is 0. `progress` hears of how many there are. */
async function bytesOf(stream, size, progress) {
  const parts = [];
  let at = 0;
  // Into place at once where the size is known: a model twice in memory is too much for some devices.
  const whole = size > 0 ? new Uint8Array(size) : null;
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (whole) {
      if (at + value.length > size) throw new Error(`more than the ${size} bytes that were announced came`);
      whole.set(value, at);
    } else {
      parts.push(value);
    }
    at += value.length;
    progress(at);
  }
  if (whole) {
    if (at !== size) throw new Error(`${at} of ${size} bytes came: the connection broke`);
    return whole;
  }
  const all = new Uint8Array(at);
  let start = 0;
  for (const part of parts) {
    all.set(part, start);
    start += part.length;
  }
  return all;
}

/** How many bytes the server has at `url`; null if there is nothing. */
export async function sizeAt(url) {
  const response = await fetch(url, { method: 'HEAD' }).catch(() => null);
  return response?.ok ? Number(response.headers.get('content-length')) : null;
}

export async function download(url, progress) {
  const response = await fetch(url).catch((e) => { throw new Error(`the server does not answer for ${url}: ${e.message}`); });
  if (!response.ok) throw new Error(`the server answers ${response.status} for ${url}`);
  // What is packed on the way has another length when it arrives.
  const size = response.headers.has('content-encoding') ? 0 : Number(response.headers.get('content-length'));
  return bytesOf(response.body, size, progress);
}

export const read = (file, progress) => bytesOf(file.stream(), file.size, progress);
