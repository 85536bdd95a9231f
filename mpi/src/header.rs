//! The message that every rank sends to every other before a call. It has the call's parameters,
//! or the reason why the rank cannot make the call.

use crate::error::Error;
use crate::transport::{Courier, Tag};

/// The version of the protocol. Raise it when messages change.
const PROTOCOL: u64 = 1;
const TEXT: usize = 240;
const FIELDS: usize = 20;
pub(crate) const BYTES: usize = 8 * (FIELDS + 1) + TEXT;

/// A call's parameters as numbers, which must be equal on all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Header {
    fields: Vec<(&'static str, u64)>,
}

/// This crate's version as a decimal number: 1.2.3 is 1002003.
fn version() -> u64 {
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    (number(env!("CARGO_PKG_VERSION_MAJOR")) * 1000 + number(env!("CARGO_PKG_VERSION_MINOR"))) * 1000
        + number(env!("CARGO_PKG_VERSION_PATCH"))
}

/// The FNV-1a hash of the bytes.
pub(crate) fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Header {
    pub fn new(fields: &[(&'static str, u64)]) -> Self {
        let own = [("the protocol", PROTOCOL), ("the version of wgpu-attention-mpi", version())];
        let fields: Vec<_> = own.iter().chain(fields).copied().collect();
        debug_assert!(fields.len() <= FIELDS);
        Header { fields }
    }

    fn write(&self, refused: Option<&str>, bytes: &mut [u8]) {
        bytes.fill(0);
        let numbers =
            [u64::from(refused.is_some())].into_iter().chain(self.fields.iter().map(|field| field.1));
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let text = refused.unwrap_or_default().as_bytes();
        let len = text.len().min(TEXT);
        bytes[8 * (FIELDS + 1)..][..len].copy_from_slice(&text[..len]);
    }
}

/// Reads a message's numbers.
fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|place| u64::from_le_bytes(place.try_into().unwrap_or_default()))
}

/// Sends this rank's header to every other rank, and compares all headers. All ranks come to the
/// same result.
pub(crate) fn agree(
    courier: &mut Courier,
    header: &Header,
    refused: Option<&Error>,
    mut idle: impl FnMut(),
) -> Result<(), Error> {
    let (own, ranks) = (courier.rank(), courier.ranks());
    let others = || (0..ranks).filter(move |rank| *rank != own);
    let text = refused.map(ToString::to_string);
    others().for_each(|rank| courier.expect(rank, Tag::Header, BYTES));
    for rank in others() {
        let mut bytes = courier.memory(BYTES);
        header.write(text.as_deref(), &mut bytes);
        courier.send(rank, Tag::Header, bytes);
    }
    let mut all = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        all.push(if rank == own {
            let mut bytes = courier.memory(BYTES);
            header.write(text.as_deref(), &mut bytes);
            bytes
        } else {
            courier.wait(rank, Tag::Header, &mut idle)?
        });
    }
    let verdict = judge(header, &all);
    all.into_iter().for_each(|bytes| courier.recycle(bytes));
    verdict
}

fn judge(header: &Header, all: &[Vec<u8>]) -> Result<(), Error> {
    let fields = |bytes: &[u8]| -> Vec<u64> { numbers(bytes).skip(1).take(header.fields.len()).collect() };
    for (rank, bytes) in all.iter().enumerate() {
        if numbers(bytes).next() != Some(0) {
            let text = bytes[8 * (FIELDS + 1)..].split(|byte| *byte == 0).next().unwrap_or_default();
            return Err(Error::Refused { rank, reason: String::from_utf8_lossy(text).into_owned() });
        }
    }
    let first = fields(&all[0]);
    for (rank, bytes) in all.iter().enumerate().skip(1) {
        for ((expected, got), (what, _)) in first.iter().zip(fields(bytes)).zip(&header.fields) {
            if *expected != got {
                let (expected, got) = (expected.to_string(), got.to_string());
                return Err(Error::Mismatch { rank, what, expected, got });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(header: &Header, refused: Option<&str>) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        header.write(refused, &mut bytes);
        bytes
    }

    #[test]
    fn whoever_differs_is_named_with_what_differs() {
        let [a, b] = [7, 8].map(|heads| Header::new(&[("batch", 1), ("heads", heads)]));
        let same = bytes(&a, None);
        assert_eq!(judge(&a, &[same.clone(), same.clone()]), Ok(()));
        let error = judge(&a, &[same.clone(), same.clone(), bytes(&b, None)]).unwrap_err().to_string();
        assert_eq!(error, "rank 2: heads is 8, but on rank 0 it is 7; all ranks must make the same call");
        let refused = judge(&a, &[same, bytes(&a, Some("`k` is short"))]).unwrap_err();
        assert_eq!(refused, Error::Refused { rank: 1, reason: "`k` is short".into() });
    }

    #[test]
    fn another_version_is_told() {
        let header = Header::new(&[("batch", 1)]);
        let mut other = bytes(&header, None);
        other[16] ^= 1;
        let error = judge(&header, &[bytes(&header, None), other]).unwrap_err().to_string();
        assert!(error.contains("rank 1: the version of wgpu-attention-mpi is"), "{error}");
    }
}
