// A WebSocket client (RFC 6455) for text, because Node 20 has none.
import { randomBytes } from 'node:crypto';
import { request } from 'node:http';

/** Connects to a `ws:` address. Calls `hear` with each text that the server sends. */
export async function connect(url, hear) {
  const headers = { connection: 'Upgrade', upgrade: 'websocket', 'sec-websocket-version': 13,
    'sec-websocket-key': randomBytes(16).toString('base64') };
  const socket = await new Promise((good, bad) => {
    request(url.replace(/^ws:/, 'http:'), { headers }).on('upgrade', (_, stream, head) => {
      stream.unshift(head);
      good(stream);
    }).on('response', ({ statusCode }) => bad(new Error(`no WebSocket: ${statusCode}`))).on('error', bad).end();
  });
  socket.on('error', () => {});
  let rest = Buffer.alloc(0);
  let parts = [];
  socket.on('data', (chunk) => {
    rest = Buffer.concat([rest, chunk]);
    for (let frame = first(rest); frame; frame = first(rest)) {
      rest = rest.subarray(frame.end);
      // 0: continuation; 1: text; others control the connection.
      if (frame.kind > 1) continue;
      parts.push(frame.data);
      if (!frame.last) continue;
      hear(Buffer.concat(parts).toString());
      parts = [];
    }
  });
  return (text) => socket.write(framed(Buffer.from(text)));
}

/** Returns the first frame of a server's bytes, if it is complete. */
function first(bytes) {
  if (bytes.length < 2) return undefined;
  const short = bytes[1] & 127;
  const start = { 126: 4, 127: 10 }[short] ?? 2;
  if (bytes.length < start) return undefined;
  const size = { 126: () => bytes.readUInt16BE(2), 127: () => Number(bytes.readBigUInt64BE(2)) }[short]?.() ?? short;
  const end = start + size;
  return bytes.length < end ? undefined : { kind: bytes[0] & 15, last: bytes[0] >= 128, data: bytes.subarray(start, end), end };
}

/** Returns the frame of a text. A client must mask the bytes. */
function framed(data) {
  const head = Buffer.alloc(data.length < 126 ? 2 : data.length < 65536 ? 4 : 10);
  head[0] = 0x81;
  head[1] = 128 | (head.length === 2 ? data.length : head.length === 4 ? 126 : 127);
  if (head.length === 4) head.writeUInt16BE(data.length, 2);
  if (head.length === 10) head.writeBigUInt64BE(BigInt(data.length), 2);
  const mask = randomBytes(4);
  return Buffer.concat([head, mask, data.map((byte, n) => byte ^ mask[n % 4])]);
}
