//! Dropout on the host: a counter-based generator decides which weights stay.

use super::Dropout;
use crate::tensor::{Error, HostTensor, Real, Shape, count, expect_length};

/// Philox 4x32-10: four random words from a counter and a key (Salmon et al. 2011, section 3.3).
pub(crate) fn philox(mut counter: [u32; 4], seed: u64) -> [u32; 4] {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// Checks the probability, and that a tensor of weights to keep fits `shape`.
pub(crate) fn check_dropout(dropout: &Dropout<HostTensor<bool>>, shape: &Shape) -> Result<(), Error> {
    dropout.check()?;
    dropout.given().map_or(Ok(()), |keep| keep.check("dropout", shape.weights()))
}

/// Zeroes the dropped weights of `[batch, heads, q_len, kv_len]` and scales the others by
/// `1 / (1 − p)`.
///
/// # Errors
/// - dimensions that are zero or do not divide
/// - slices of another length
/// - a probability outside of `[0, 1)`
/// - a tensor of weights to keep that does not broadcast
pub fn dropout<R: Real>(
    weights: &mut [R],
    shape: Shape,
    dropout: &Dropout<HostTensor<bool>>,
) -> Result<(), Error> {
    shape.check()?;
    expect_length("weights", weights, count(shape.weights()))?;
    check_dropout(dropout, &shape)?;
    let scale = R::of(f64::from(dropout.factor()));
    let [_, heads, q_len, kv_len] = shape.weights();
    for (flat, weight) in weights.iter_mut().enumerate() {
        let (j, i, bh) = (flat % kv_len, flat / kv_len % q_len, flat / kv_len / q_len);
        let keep = match dropout {
            Dropout::Seeded { seed, .. } => {
                philox([j as u32 / 4, i as u32, bh as u32, 0], *seed)[j % 4] >= dropout.threshold()
            }
            Dropout::Given { keep, .. } => keep.at([bh / heads, bh % heads, i, j]) == Some(true),
        };
        *weight = if keep { *weight * scale } else { R::zero() };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    /// Known answers of the generator's authors (Random123, `kat_vectors`).
    #[test]
    fn philox_gives_the_published_words() {
        let pi = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], 0x299f_31d0_a409_3822);
        let cases = [
            (([0; 4], 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            (([u32::MAX; 4], u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ];
        for ((counter, key), want) in cases {
            assert_eq!(super::philox(counter, key), want);
        }
    }
}
