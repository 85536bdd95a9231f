//! The buffers of a case: their contents, windows of them, and the bytes that must stay unchanged.

use half::{bf16, f16};
use wgpu_attention::reference::{Real, widen};
use wgpu_attention::{DType, Gpu, TensorView};

use crate::choices::Choices;
use crate::memory::Place;
use crate::random::Rng;

/// The buffers of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buf {
    FloatsA,
    FloatsB,
    Halves,
    BFloats,
    /// Lengths and small numbers.
    Numbers,
    /// Ascending numbers.
    Starts,
    Bools,
    /// Any bits.
    Bits,
    OutA,
    OutB,
    OutC,
    /// Not a multiple of four bytes.
    Odd,
    Tiny,
    /// Without the usage for shaders.
    Closed,
    /// Larger than the binding limit.
    Huge,
    /// On another device.
    Foreign,
    Destroyed,
    Mapped,
}

impl Buf {
    pub const ALL: [Buf; 18] = [
        Buf::FloatsA,
        Buf::FloatsB,
        Buf::Halves,
        Buf::BFloats,
        Buf::Numbers,
        Buf::Starts,
        Buf::Bools,
        Buf::Bits,
        Buf::OutA,
        Buf::OutB,
        Buf::OutC,
        Buf::Odd,
        Buf::Tiny,
        Buf::Closed,
        Buf::Huge,
        Buf::Foreign,
        Buf::Destroyed,
        Buf::Mapped,
    ];
    pub const OUTS: [Buf; 3] = [Buf::OutA, Buf::OutB, Buf::OutC];
    /// The number of first buffers that are read back after every case.
    pub const WATCHED: usize = 13;

    /// True if its elements of `dtype` are numbers that results can be judged with.
    pub fn holds(self, dtype: DType) -> bool {
        match self {
            Buf::FloatsA | Buf::FloatsB => dtype == DType::F32,
            Buf::Halves => dtype == DType::F16,
            Buf::BFloats => dtype == DType::BF16,
            Buf::Numbers | Buf::Starts => dtype == DType::U32,
            Buf::Bools => dtype == DType::Bool,
            _ => false,
        }
    }

    /// True if a submission may fail because of the buffer. Its owner is then at fault.
    pub fn fails(self) -> bool {
        matches!(self, Buf::Destroyed | Buf::Mapped | Buf::Foreign)
    }
}

/// The size of every ordinary buffer.
pub const BYTES: usize = 16384;
const HUGE: u64 = 160 << 20;

/// As f16 a NaN, and as f32 a number that no case computes.
const POISON: u32 = 0x7e5a_7e5a;

/// A window of a buffer, valid or not.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub buf: Buf,
    pub dtype: DType,
    pub shape: [usize; 4],
    pub strides: [usize; 4],
    pub offset: usize,
}

impl Window {
    /// Returns a window inside the buffer, aligned for vec4 loads or not.
    pub fn new(c: &mut Choices, buf: Buf, dtype: DType, shape: [usize; 4], aligned: bool) -> Self {
        let order = match c.below(4) {
            0 => [0, 2, 1, 3],
            1 if !aligned => [2, 0, 3, 1],
            _ => [0, 1, 2, 3],
        };
        let unit = if aligned { 4 } else { 1 };
        let dense = c.one_in(2);
        let mut strides = [0; 4];
        let mut stride = 1usize;
        for axis in order.into_iter().rev() {
            strides[axis] = stride;
            stride = stride.saturating_mul(shape[axis]);
            if !dense {
                stride = stride.saturating_add(unit * c.below(3));
            }
            if aligned {
                stride = stride.checked_next_multiple_of(4).unwrap_or(stride);
            }
        }
        let room = (BYTES / dtype.bytes()).saturating_sub(stride) / unit;
        let mut offset = if c.one_in(3) { 0 } else { unit * c.below(room.min(300) + 1) };
        if !aligned && offset.is_multiple_of(4) && room > 300 {
            offset += 1;
        }
        Window { buf, dtype, shape, strides, offset }
    }

    /// Like [`new`](Self::new), for an input in the buffer for its type. Axes may be broadcast.
    pub fn input(c: &mut Choices, dtype: DType, shape: [usize; 4], aligned: bool) -> Self {
        let buf = match dtype {
            DType::F32 => c.pick(&[Buf::FloatsA, Buf::FloatsB]),
            DType::F16 => Buf::Halves,
            DType::BF16 => Buf::BFloats,
            DType::U32 => Buf::Numbers,
            DType::Bool => Buf::Bools,
            _ => unreachable!("{dtype:?} is new"),
        };
        let mut window = Self::new(c, buf, dtype, shape, aligned);
        if c.one_in(12) {
            window.strides[c.below(3)] = 0;
        }
        window
    }

    /// Makes the window invalid, or changes it beyond the plan.
    pub fn spoil(&mut self, c: &mut Choices) {
        let axis = c.below(4);
        match c.below(10) {
            0 => self.shape[axis] = c.size(),
            1 => self.shape[axis] = self.shape[axis].wrapping_add(1),
            2 => self.shape[axis] = self.shape[axis].wrapping_sub(1),
            3 => self.strides[axis] = c.size(),
            4 => self.offset = c.size(),
            5 => {
                // To the end of the buffer, or one element further.
                let reach: usize = (0..4)
                    .map(|a| self.shape[a].saturating_sub(1).saturating_mul(self.strides[a]))
                    .fold(0, usize::saturating_add);
                let len = BYTES / self.dtype.bytes();
                self.offset = len.saturating_sub(reach).saturating_sub(1) + c.below(2);
            }
            6 => self.dtype = c.pick(&[DType::F32, DType::F16, DType::BF16, DType::U32, DType::Bool]),
            7 | 8 => self.buf = c.pick(&Buf::ALL),
            _ => {
                let other = c.below(4);
                self.shape.swap(axis, other);
                self.strides.swap(axis, other);
            }
        }
    }

    /// Returns the number of elements, or `usize::MAX` if it overflows.
    pub fn count(&self) -> usize {
        self.shape.into_iter().fold(1, usize::saturating_mul)
    }

    /// True if an element of each may be at the same place.
    pub fn overlaps(&self, other: &Window) -> bool {
        let range = |w: &Window| {
            let size = w.dtype.bytes();
            let reach = |axis: usize| w.shape[axis].saturating_sub(1).saturating_mul(w.strides[axis]);
            let last = (0..4).map(reach).fold(w.offset, usize::saturating_add);
            w.offset.saturating_mul(size)..last.saturating_add(1).saturating_mul(size)
        };
        let (own, others) = (range(self), range(other));
        self.buf == other.buf && own.start < others.end && others.start < own.end
    }

    /// True if results can be judged with its elements.
    pub fn is_tame(&self) -> bool {
        self.buf.holds(self.dtype)
    }

    /// True if its buffer is read back.
    pub fn is_watched(&self) -> bool {
        (self.buf as usize) < Buf::WATCHED
    }

    /// Returns the buffer indices in logical order.
    fn indices(&self) -> impl Iterator<Item = usize> + use<> {
        let Window { shape, strides, offset, .. } = *self;
        Place { shape, strides, offset, len: 0 }.indices()
    }

    pub fn floats(&self, bytes: &[Vec<u8>]) -> Vec<f32> {
        let bytes = &bytes[self.buf as usize];
        let read = |n: usize| match self.dtype {
            DType::F16 => f16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).to_f32(),
            _ => f32::from_le_bytes(std::array::from_fn(|b| bytes[4 * n + b])),
        };
        self.indices().map(read).collect()
    }

    pub fn wide<R: Real>(&self, bytes: &[Vec<u8>]) -> Vec<R> {
        widen(&self.floats(bytes))
    }

    pub fn numbers(&self, bytes: &[Vec<u8>]) -> Vec<u32> {
        let bytes = &bytes[self.buf as usize];
        self.indices().map(|n| u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * n + b]))).collect()
    }

    pub fn bools(&self, bytes: &[Vec<u8>]) -> Vec<bool> {
        self.indices().map(|n| bytes[self.buf as usize][n] != 0).collect()
    }
}

/// The buffers on a device, and their contents.
pub struct Arena {
    /// The buffers of the current case.
    pub buffers: Vec<wgpu::Buffer>,
    /// Separate buffers, then one buffer in place of all watched ones.
    placements: [Vec<wgpu::Buffer>; 2],
    /// The contents of the watched buffers.
    pub before: Vec<Vec<u8>>,
    pub after: Vec<Vec<u8>>,
    staging: wgpu::Buffer,
    hash: u64,
}

impl Arena {
    pub fn new(gpu: &Gpu, foreign: &Gpu) -> Self {
        let mut rng = Rng::new(7);
        let before: Vec<Vec<u8>> =
            Buf::ALL[..Buf::WATCHED].iter().map(|buf| content(*buf, &mut rng)).collect();
        let device = gpu.device();
        use wgpu::BufferUsages as U;
        let make = |device: &wgpu::Device, size: u64, usage, mapped_at_creation| {
            device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation })
        };
        let all = U::STORAGE | U::COPY_SRC | U::COPY_DST;
        let buffer = |buf: &Buf| match buf {
            Buf::Odd => make(device, 62, all, false),
            Buf::Closed => make(device, BYTES as u64, all - U::STORAGE, false),
            Buf::Huge => make(device, HUGE, U::STORAGE, false),
            Buf::Foreign => make(foreign.device(), BYTES as u64, all, false),
            Buf::Mapped => make(device, BYTES as u64, all, true),
            Buf::Destroyed => {
                let buffer = make(device, BYTES as u64, all, false);
                buffer.destroy();
                buffer
            }
            watched => make(device, before[*watched as usize].len() as u64, all, false),
        };
        let buffers: Vec<_> = Buf::ALL.iter().map(buffer).collect();
        let size = before.iter().map(|bytes| bytes.len() as u64).sum();
        let staging = make(device, size, U::MAP_READ | U::COPY_DST, false);
        let one = make(device, (BYTES * Buf::WATCHED) as u64, all, false);
        let mut in_one = buffers.clone();
        in_one[..Buf::WATCHED].fill(one);
        for placement in [&buffers, &in_one] {
            for (n, bytes) in before.iter().enumerate() {
                gpu.queue().write_buffer(&placement[n], base(placement, n) as u64, bytes);
            }
        }
        let placements = [buffers.clone(), in_one];
        Arena { buffers, placements, after: before.clone(), before, staging, hash: 0 }
    }

    /// Puts the tensors of the next cases into separate buffers or into one buffer.
    pub fn place(&mut self, in_one: bool) {
        self.buffers = self.placements[usize::from(in_one)].clone();
    }

    /// Records the read-back of all watched buffers.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut at = 0;
        for (n, bytes) in self.before.iter().enumerate() {
            let from = base(&self.buffers, n) as u64;
            encoder.copy_buffer_to_buffer(&self.buffers[n], from, &self.staging, at, bytes.len() as u64);
            at += bytes.len() as u64;
        }
    }

    /// Returns and resets the hash of all writes to the buffers.
    pub fn take_hash(&mut self) -> u64 {
        std::mem::take(&mut self.hash)
    }

    /// Reads the buffers back. Only `writes` may have changed; with `whole`, all of their elements
    /// must have changed.
    pub fn compare(&mut self, gpu: &Gpu, writes: &[Window], whole: bool) -> Result<(), String> {
        self.staging.map_async(wgpu::MapMode::Read, .., |_| ());
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).map_err(|e| e.to_string())?;
        let mapped = self.staging.slice(..).get_mapped_range().map_err(|e| e.to_string())?;
        let mut at = 0;
        for bytes in &mut self.after {
            let n = bytes.len();
            bytes.copy_from_slice(&mapped[at..at + n]);
            at += n;
        }
        drop(mapped);
        self.staging.unmap();
        let written = self.before.iter().zip(&self.after).filter(|(before, after)| before != after);
        self.hash = written
            .flat_map(|(_, after)| after)
            .fold(self.hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
        let mut found = Ok(());
        for (n, buf) in Buf::ALL[..Buf::WATCHED].iter().enumerate() {
            let (before, after) = (&self.before[n], &self.after[n]);
            if before == after {
                let missed = writes.iter().find(|w| w.buf == *buf && whole && Buf::OUTS.contains(buf));
                found = found.and(missed.map_or(Ok(()), |w| Err(format!("nothing was written to {w:?}"))));
                continue;
            }
            let mut may = vec![false; after.len()];
            for w in writes.iter().filter(|w| w.buf == *buf) {
                let size = w.dtype.bytes();
                for (logical, n) in w.indices().enumerate() {
                    may[n * size..(n + 1) * size].fill(true);
                    if whole
                        && Buf::OUTS.contains(buf)
                        && before[n * size..(n + 1) * size] == after[n * size..(n + 1) * size]
                    {
                        found = found.and(Err(format!("element {logical} of {w:?} was not written")));
                    }
                }
            }
            if let Some(byte) = (0..after.len()).find(|n| !may[*n] && before[*n] != after[*n]) {
                found =
                    found.and(Err(format!("byte {byte} of {buf:?}, outside of every output, was written")));
            }
            gpu.queue().write_buffer(&self.buffers[n], base(&self.buffers, n) as u64, before);
        }
        found
    }
}

/// Returns the first byte of a buffer's contents: 0, or the place in one buffer for all.
fn base(buffers: &[wgpu::Buffer], n: usize) -> usize {
    if in_one(buffers, n) { n * BYTES } else { 0 }
}

fn in_one(buffers: &[wgpu::Buffer], n: usize) -> bool {
    buffers[0] == buffers[1] && n < Buf::WATCHED
}

/// Returns the first byte of the contents for a tensor that ends at byte `end` of them. Both
/// placements must refuse a tensor past the end of its part. In one buffer for all, such a tensor
/// starts past the end of the buffer.
pub fn start(buffers: &[wgpu::Buffer], buf: Buf, end: usize) -> usize {
    let len = match buf {
        Buf::Odd => 60,
        Buf::Tiny => 4,
        _ => BYTES,
    };
    let is_past = in_one(buffers, buf as usize) && end > len;
    if is_past { BYTES * Buf::WATCHED } else { base(buffers, buf as usize) }
}

/// Returns a window as a tensor view.
pub fn view<'a>(buffers: &'a [wgpu::Buffer], window: &Window) -> TensorView<'a> {
    let size = window.dtype.bytes();
    let reach = |axis: usize| window.shape[axis].saturating_sub(1).saturating_mul(window.strides[axis]);
    let end = (0..4).map(reach).fold(window.offset, usize::saturating_add).saturating_add(1);
    let first = start(buffers, window.buf, end.saturating_mul(size)) / size;
    TensorView::new(&buffers[window.buf as usize], window.dtype, window.shape)
        .with_strides(window.strides)
        .with_offset(window.offset.saturating_add(first))
}

fn content(buf: Buf, rng: &mut Rng) -> Vec<u8> {
    let words = |n: usize, word: &mut dyn FnMut(usize) -> u32| -> Vec<u8> {
        (0..n).flat_map(|n| word(n).to_le_bytes()).collect()
    };
    let n = BYTES / 4;
    match buf {
        Buf::FloatsA | Buf::FloatsB => words(n, &mut |_| rng.normal().to_bits()),
        Buf::Halves => (0..2 * n).flat_map(|_| f16::from_f32(rng.normal()).to_le_bytes()).collect(),
        Buf::BFloats => (0..2 * n).flat_map(|_| bf16::from_f32(rng.normal()).to_le_bytes()).collect(),
        Buf::Numbers => words(n, &mut |_| match rng.below(12) {
            0 => u32::MAX,
            1 => 1000,
            _ => rng.below(12) as u32,
        }),
        Buf::Starts => {
            let mut start = 0;
            words(n, &mut |n| {
                start = if n % 64 == 0 { 0 } else { start + rng.below(4) as u32 };
                start
            })
        }
        Buf::Bools => (0..BYTES).map(|_| [0, 1, 1, 0x80][rng.below(4)]).collect(),
        Buf::Bits => words(n, &mut |_| match rng.below(4) {
            0 => [0x7fc0_0000, 0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 0, 0x8000_0000, 1, u32::MAX]
                [rng.below(8)],
            _ => rng.word() as u32,
        }),
        Buf::Odd => words(15, &mut |_| rng.normal().to_bits()),
        Buf::Tiny => words(1, &mut |_| rng.normal().to_bits()),
        _ => words(n, &mut |_| POISON),
    }
}
