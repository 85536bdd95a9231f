//! Formats of keys and values, and their comparison on a text.

use std::time::Instant;

use wgpu_attention::cache::{CacheStorage, ScaleGroup};
use wgpu_attention::reference::cache::{hadamard, stored};

use crate::Fallible;
use crate::model::{Layout, Logits, Model, Session};

/// Formats with a name on the command line.
#[derive(Clone, Copy, Debug)]
pub struct CacheKind {
    pub name: &'static str,
    /// The format of keys, and of values.
    pub storages: [CacheStorage; 2],
    /// True if each head's channels are multiplied by a Walsh–Hadamard matrix.
    pub rotated: bool,
}

const fn plain(name: &'static str, storage: CacheStorage) -> CacheKind {
    CacheKind { name, storages: [storage; 2], rotated: false }
}

const fn rotated(name: &'static str, keys: CacheStorage, values: CacheStorage) -> CacheKind {
    CacheKind { name, storages: [keys, values], rotated: true }
}

const Q8: CacheStorage = CacheStorage::Q8(ScaleGroup::Of(32));
const Q4: CacheStorage = CacheStorage::Q4(ScaleGroup::Of(32));
const GAUSSIAN4: CacheStorage = CacheStorage::Gaussian4(ScaleGroup::Row);

pub const KINDS: [CacheKind; 15] = [
    plain("f32", CacheStorage::F32),
    plain("f16", CacheStorage::F16),
    plain("bf16", CacheStorage::BF16),
    plain("e4m3", CacheStorage::E4M3(ScaleGroup::Row)),
    plain("e5m2", CacheStorage::E5M2(ScaleGroup::Row)),
    plain("q8", Q8),
    rotated("q8-rotated", Q8, Q8),
    rotated("q8-q4-rotated", Q8, Q4),
    plain("q4", Q4),
    rotated("q4-rotated", Q4, Q4),
    plain("q4_0", CacheStorage::Q4_0),
    rotated("q4_0-rotated", CacheStorage::Q4_0, CacheStorage::Q4_0),
    plain("gaussian4", GAUSSIAN4),
    rotated("gaussian4-rotated", GAUSSIAN4, GAUSSIAN4),
    rotated("q8-gaussian4-rotated", Q8, GAUSSIAN4),
];

impl From<CacheStorage> for CacheKind {
    fn from(storage: CacheStorage) -> Self {
        plain("", storage)
    }
}

impl CacheKind {
    /// Returns the format of a name.
    pub fn named(name: &str) -> Fallible<Self> {
        let names: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
        let found = KINDS.into_iter().find(|kind| kind.name == name);
        found.ok_or_else(|| format!("--cache is one of {}, not {name}", names.join(", ")).into())
    }

    /// The channels of a block that is multiplied, for heads of `dim` channels. It is the largest
    /// power of two that divides them, and none below 32.
    pub fn block(&self, dim: usize) -> Option<usize> {
        let block = 1 << dim.trailing_zeros();
        (self.rotated && block >= 32).then_some(block)
    }

    /// A row of keys (side 0) or values (side 1) as a cache gives it back.
    fn kept(&self, side: usize, row: &[f32]) -> Vec<f32> {
        let storage = self.storages[side];
        match self.block(row.len()) {
            Some(block) => hadamard(&stored(storage, &hadamard(row, block)), block),
            None => stored(storage, row),
        }
    }
}

/// Tokens of a step. The logits of all of them are in memory.
const ROWS: usize = 128;
/// Tokens that are generated to measure their time.
const TIMED: usize = 9;

/// Compares all formats on a text. Prints its perplexity, the memory and the time of a token, and
/// the errors of keys and values.
pub fn compare(model: &Model, tokens: &[u32]) -> Fallible<()> {
    if tokens.len() < 2 {
        return Err("the text of --perplexity has fewer than two tokens".into());
    }
    let context = model.sizes.context.saturating_sub(TIMED);
    if tokens.len() > context {
        return Err(
            format!("the text of --perplexity has {} tokens, more than {context}", tokens.len()).into()
        );
    }
    println!("{} tokens", tokens.len());
    println!(
        "{:20} {:>10} {:>12} {:>14} {:>10}",
        "cache", "perplexity", "× of f32", "bytes a token", "ms a token"
    );
    let mut exact = Vec::new();
    let mut least = None;
    for kind in KINDS {
        let layout = Layout { batch: 1, capacity: tokens.len() + TIMED, shared: 0, rows: ROWS, kind };
        let mut session = Session::new(model, layout)?;
        let perplexity = perplexity(&mut session, tokens, model.sizes.vocabulary)?;
        let least = *least.get_or_insert(perplexity);
        if kind.name == KINDS[0].name {
            exact = (0..model.sizes.layers).map(|n| session.keys_and_values(n)).collect::<Result<_, _>>()?;
        }
        let mut times = Vec::new();
        for _ in 0..TIMED {
            let started = Instant::now();
            session.feed(&[&tokens[..1]])?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{:20} {perplexity:>10.4} {:>12.4} {:>14} {:>10.1}",
            kind.name,
            perplexity / least,
            session.token_bytes,
            times[TIMED / 2]
        );
    }
    print_errors(model, &exact);
    Ok(())
}

/// The exponential of the mean negative logarithm of each token's probability after those before.
fn perplexity(session: &mut Session, tokens: &[u32], vocabulary: usize) -> Fallible<f64> {
    let mut sum = 0f64;
    for start in (0..tokens.len()).step_by(ROWS) {
        let part = &tokens[start..(start + ROWS).min(tokens.len())];
        let (logits, _) = session.step(&[part], Logits::All)?;
        for (row, next) in logits.chunks_exact(vocabulary).zip(&tokens[start + 1..]) {
            let most = row.iter().fold(f32::NEG_INFINITY, |most, x| most.max(*x));
            let total: f64 = row.iter().map(|x| f64::from(x - most).exp()).sum();
            sum += total.ln() - f64::from(row[*next as usize] - most);
        }
    }
    Ok((sum / (tokens.len() - 1) as f64).exp())
}

/// Prints the error of stored keys and values of each layer, relative to their size.
fn print_errors(model: &Model, exact: &[[Vec<f32>; 2]]) {
    println!("\nerror of keys / of values, % of their size");
    let kinds = || KINDS.iter().skip(1);
    println!("{:7}{}", "layer", kinds().map(|kind| format!("{:>21}", kind.name)).collect::<String>());
    for (n, sides) in exact.iter().enumerate() {
        let cell = |kind: &CacheKind| {
            let [k, v] = [0, 1].map(|side| {
                let rows = &sides[side];
                let (mut error, mut size) = (0f64, 0f64);
                for row in rows.chunks(model.sizes.dim) {
                    for (x, kept) in row.iter().zip(kind.kept(side, row)) {
                        error += f64::from(x - kept).powi(2);
                        size += f64::from(*x).powi(2);
                    }
                }
                100.0 * (error / size.max(f64::MIN_POSITIVE)).sqrt()
            });
            format!("{:>21}", format!("{k:.2} / {v:.2}"))
        };
        println!("{n:<7}{}", kinds().map(cell).collect::<String>());
    }
}
