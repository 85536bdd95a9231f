// Reads files from the server or the user, with progress.

/** Reads a stream of `size` bytes; 0 means an unknown size. Calls `progress` with the number of bytes so far. */
async function bytesOf(stream, size, progress) {
  const parts = [];
  let at = 0;
  // With a known size, write to the final array: two copies of a model are too much for some devices.
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

/** Returns the size of the file at `url` in bytes; null if there is none. */
export async function sizeAt(url) {
  const response = await fetch(url, { method: 'HEAD' }).catch(() => null);
  return response?.ok ? Number(response.headers.get('content-length')) : null;
}

export async function download(url, progress) {
  const response = await fetch(url).catch((e) => { throw new Error(`the server does not answer for ${url}: ${e.message}`); });
  if (!response.ok) throw new Error(`the server answers ${response.status} for ${url}`);
  // The length of an encoded response differs from the file's.
  const size = response.headers.has('content-encoding') ? 0 : Number(response.headers.get('content-length'));
  return bytesOf(response.body, size, progress);
}

export const read = (file, progress) => bytesOf(file.stream(), file.size, progress);
