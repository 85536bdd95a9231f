//! Reads little-endian values from untrusted bytes.

/// A position in bytes that are being read.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Starts at byte `at`, which must lie within `bytes`.
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Reader { bytes, at }
    }

    /// The next byte's position.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], String> {
        if len > self.left() as u64 {
            let (at, left) = (self.at, self.left());
            return Err(format!("{what} needs {len} bytes at byte {at}, but {left} are left"));
        }
        let taken = &self.bytes[self.at..][..len as usize];
        self.at += len as usize;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64, what)?);
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a count of items. Each item takes at least `smallest` bytes, and all must fit in the
    /// rest of the file.
    pub(super) fn count(&mut self, what: &str, smallest: u64) -> Result<usize, String> {
        let count = self.u64(what)?;
        if count.checked_mul(smallest).is_none_or(|bytes| bytes > self.left() as u64) {
            return Err(format!("{what} is {count}, but only {} bytes are left", self.left()));
        }
        Ok(count as usize)
    }

    /// Reads `count` values of `N` bytes.
    pub(super) fn values<const N: usize, T>(
        &mut self,
        count: usize,
        what: &str,
        value: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, String> {
        let bytes = self.take((count as u64).saturating_mul(N as u64), what)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| value(*bytes)).collect())
    }

    pub(super) fn string(&mut self, what: &str) -> Result<String, String> {
        let len = self.u64(what)?;
        let text = std::str::from_utf8(self.take(len, what)?);
        text.map(str::to_owned).map_err(|_| format!("{what} is not UTF-8"))
    }
}
