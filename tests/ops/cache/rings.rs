//! Rings that go back, compared with a plain list of slots. A ring refuses if an overwritten token
//! would be missing.

use wgpu_attention::cache::{Append, CacheLayout, Tokens};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Mask, Scratch, ScratchSize, TensorView,
};

use crate::harness::full;

/// The most tokens of a sequence, and channels of a value. Token n has a one in channel n.
const TOKENS: usize = 14;
/// The token that follows after a sequence went back.
const NEW: usize = TOKENS - 1;

/// One sequence of a ring as a list of slots.
#[derive(Clone)]
struct Plain {
    sinks: usize,
    spare: usize,
    /// The position whose row each slot holds.
    slots: Vec<Option<usize>>,
    tokens: Vec<usize>,
}

impl Plain {
    fn new(capacity: usize, sinks: usize, spare: usize) -> Self {
        Plain { sinks, spare, slots: vec![None; capacity], tokens: Vec::new() }
    }

    /// Returns the number of slots without the sinks.
    fn last(&self) -> usize {
        self.slots.len() - self.sinks
    }

    fn slot(&self, position: usize) -> usize {
        if position < self.sinks { position } else { self.sinks + (position - self.sinks) % self.last() }
    }

    fn push(&mut self, token: usize) {
        let (position, slot) = (self.tokens.len(), self.slot(self.tokens.len()));
        self.slots[slot] = Some(position);
        self.tokens.push(token);
    }

    fn holds(&self, position: usize) -> bool {
        self.slots[self.slot(position)] == Some(position)
    }

    /// True if the ring still has each of `len` tokens that it must retain.
    fn can_go_back(&self, len: usize) -> bool {
        let must = |position: usize| position < self.sinks || position + self.last() - self.spare >= len;
        (0..len).all(|position| !must(position) || self.holds(position))
    }

    /// Returns true for each token that attention sees.
    fn seen(&self, sees: impl Fn(usize) -> bool) -> Vec<bool> {
        let mut seen = vec![false; TOKENS];
        let positions = (0..self.tokens.len()).filter(|position| sees(*position));
        positions.for_each(|position| seen[self.tokens[position]] = true);
        seen
    }
}

/// A ring whose sequences each have a length and go back to another one, and their model.
struct Rings {
    gpu: &'static Gpu,
    attention: Attention,
    cache: Cache,
    plain: Vec<Plain>,
    /// The lengths before and after.
    moves: Vec<[usize; 2]>,
    name: String,
}

impl Rings {
    fn new(capacity: usize, sinks: usize, spare: usize) -> Self {
        let gpu = &full().gpu;
        let moves: Vec<_> = (1..=2 * capacity + 2).flat_map(|n| (0..=n).map(move |len| [n, len])).collect();
        let config = CacheConfig::new(1, 4, capacity)
            .value_dim(TOKENS)
            .batch(moves.len())
            .layout(CacheLayout::Ring { sink_tokens: sinks })
            .spare_tokens(spare);
        let mut plain = vec![Plain::new(capacity, sinks, spare); moves.len()];
        for (plain, [before, _]) in plain.iter_mut().zip(&moves) {
            (0..*before).for_each(|token| plain.push(token));
        }
        let mut rings = Rings {
            gpu,
            attention: Attention::with_pipelines(gpu.pipelines(), Config::new(1, 4).value_dim(TOKENS))
                .expect("an operator"),
            cache: Cache::with_pipelines(gpu.pipelines(), config).expect("a cache"),
            plain,
            moves,
            name: format!("capacity {capacity}, {sinks} sinks, {spare} spare"),
        };
        let counts: Vec<_> = rings.moves.iter().map(|[before, _]| *before).collect();
        rings.append(Tokens::Each(&counts), 2 * capacity + 2, 0);
        rings
    }

    /// Advances by `counts`, and appends tokens from `first` on.
    fn append(&mut self, counts: Tokens, rows: usize, first: usize) {
        let batch = self.moves.len();
        let keys = self.gpu.upload(&vec![0.0f32; batch * rows * 4]).expect("an upload");
        let one = |n: usize| f32::from(u8::from(n % TOKENS == first + n / TOKENS % rows));
        let values: Vec<f32> = (0..batch * rows * TOKENS).map(one).collect();
        let values = self.gpu.upload(&values).expect("an upload");
        let k = TensorView::new(&keys, DType::F32, [batch, 1, rows, 4]);
        let v = TensorView::new(&values, DType::F32, [batch, 1, rows, TOKENS]);
        self.gpu
            .submit(|e| {
                self.cache.advance(e, counts)?;
                self.cache.append(e, 0, &Append::new(k, v))
            })
            .expect("room");
    }

    /// Appends one more token to each sequence. Attention must see exactly the contents of the
    /// slots. Inside a window that the spare tokens allow, a ring that never went back must see the
    /// same.
    fn go_on(mut self) {
        self.append(Tokens::All(1), 1, NEW);
        self.plain.iter_mut().for_each(|plain| plain.push(NEW));
        let Plain { sinks, spare, .. } = self.plain[0];
        let last = self.plain[0].last();
        let batch = self.moves.len();
        let query = self.gpu.upload(&vec![0.0f32; batch * 4]).expect("an upload");
        let query = TensorView::new(&query, DType::F32, [batch, 1, 1, 4]);
        for window in [None, Some(last - spare)] {
            let out = self.gpu.upload(&vec![f32::NAN; batch * TOKENS]).expect("an upload");
            let view = TensorView::new(&out, DType::F32, [batch, 1, 1, TOKENS]);
            let mut mask = Mask::causal();
            if let Some(left) = window {
                mask = mask.window(left, 0);
            }
            let call = Forward::with_cache(query, &self.cache, view).at_end().mask(mask);
            let mut scratch = Scratch::new(self.gpu.device(), ScratchSize::default()).expect("scratch");
            self.gpu.submit(|e| self.attention.forward(e, &call, &mut scratch)).expect("a recording");
            let out: Vec<f32> = self.gpu.download(&out, batch * TOKENS).expect("a read-back");
            for (s, plain) in self.plain.iter().enumerate() {
                let got: Vec<_> = out[s * TOKENS..][..TOKENS].iter().map(|x| *x > 0.0).collect();
                let len = plain.tokens.len();
                let in_window = |j: usize| j < sinks || window.is_none_or(|left| j + left + 1 >= len);
                let name = format!("{}, {:?}, window {window:?}", self.name, self.moves[s]);
                assert_eq!(got, plain.seen(|j| plain.holds(j) && in_window(j)), "{name}");
                if spare == 0 || window.is_some() {
                    let never_back = |j: usize| j < sinks || j + last >= len;
                    assert_eq!(got, plain.seen(|j| never_back(j) && in_window(j)), "{name}: never back");
                }
            }
        }
    }

    fn numbers(&self, view: TensorView) -> Vec<u32> {
        let [stride, ..] = view.strides();
        let words = view.offset() + (self.moves.len() - 1) * stride + 1;
        let table: Vec<u32> = self.gpu.download(view.buffer(), words).expect("a read-back");
        (0..self.moves.len()).map(|s| table[view.offset() + s * stride]).collect()
    }
}

/// Returns every small ring: capacity, sinks, spare tokens.
fn rings() -> impl Iterator<Item = [usize; 3]> {
    let sinks = |capacity| (0..capacity).map(move |sinks| [capacity, sinks]);
    let spare = |[capacity, sinks]: [usize; 2]| (0..capacity - sinks).map(move |n| [capacity, sinks, n]);
    (1..=5).flat_map(sinks).flat_map(spare)
}

#[test]
fn truncated_rings_hold_their_tokens() {
    let mut refused = 0;
    for [capacity, sinks, spare] in rings() {
        let mut rings = Rings::new(capacity, sinks, spare);
        for (s, [_, len]) in rings.moves.iter().enumerate() {
            let plain = &mut rings.plain[s];
            let context = format!("{}, {:?}", rings.name, rings.moves[s]);
            match rings.cache.truncate(s, *len) {
                Ok(()) => {
                    assert!(plain.can_go_back(*len), "{context} is accepted");
                    plain.tokens.truncate(*len);
                }
                Err(Error::Option { option: "len", .. }) => {
                    assert!(!plain.can_go_back(*len), "{context} is refused");
                    refused += 1;
                }
                Err(error) => panic!("{context}: {error}"),
            }
        }
        rings.go_on();
    }
    assert!(refused > 100, "{refused} refusals");
}

#[test]
fn rewound_rings_hold_their_tokens() {
    for [capacity, sinks, spare] in rings() {
        let mut rings = Rings::new(capacity, sinks, spare);
        for s in 0..rings.moves.len() {
            let [before, len] = rings.moves[s];
            if len == before {
                continue;
            }
            let mut counts = vec![0; rings.moves.len()];
            counts[s] = before - len;
            let plain = &mut rings.plain[s];
            let context = format!("{}, {:?}", rings.name, rings.moves[s]);
            match rings.gpu.submit(|e| rings.cache.rewind(e, Tokens::Each(&counts))) {
                Ok(()) => {
                    assert!(plain.can_go_back(len), "{context} is accepted");
                    plain.tokens.truncate(len);
                }
                Err(Error::Option { option: "rows", .. }) => {
                    assert!(!plain.can_go_back(len), "{context} is refused");
                }
                Err(error) => panic!("{context}: {error}"),
            }
        }
        rings.go_on();
    }
}

/// The device refuses and counts. The host knows it after it has read the lengths back.
#[test]
fn device_rewound_rings_hold_their_tokens() {
    for [capacity, sinks, spare] in rings() {
        let mut rings = Rings::new(capacity, sinks, spare);
        let counts: Vec<u32> = rings.moves.iter().map(|[before, len]| (before - len) as u32).collect();
        let counts = rings.gpu.upload(&counts).expect("an upload");
        let counts = TensorView::new(&counts, DType::U32, [rings.moves.len(), 1, 1, 1]);
        let rows = Tokens::Device { counts, most: 2 * capacity + 2 };
        rings.gpu.submit(|e| rings.cache.rewind(e, rows)).expect("the host cannot know");
        let lengths = rings.numbers(rings.cache.lengths());
        let refusals = rings.numbers(rings.cache.refusals());
        for (s, [_, len]) in rings.moves.iter().enumerate() {
            let plain = &mut rings.plain[s];
            let context = format!("{}, {:?}", rings.name, rings.moves[s]);
            let refused = !plain.can_go_back(*len);
            if !refused {
                plain.tokens.truncate(*len);
            }
            assert_eq!(
                [lengths[s], refusals[s]],
                [plain.tokens.len() as u32, u32::from(refused)],
                "{context}"
            );
            rings.cache.set_known_len(s, lengths[s] as usize).expect("what the device says is possible");
            let Some(wanted) = plain.tokens.len().checked_sub(1) else { continue };
            match rings.cache.truncate(s, wanted) {
                Ok(()) => {
                    assert!(plain.can_go_back(wanted), "{context}, then {wanted} is accepted");
                    plain.tokens.truncate(wanted);
                }
                // With spare tokens the host may assume a longer history than the ring had.
                Err(_) => {
                    assert!(spare > 0 || !plain.can_go_back(wanted), "{context}, then {wanted} is refused")
                }
            }
        }
        rings.go_on();
    }
}
