//! The free pages of a paged cache, and the number of sequences that share each page.

/// Pages by number, with counts of their owners.
#[derive(Clone, Debug)]
pub(super) struct Pages {
    owners: Vec<u32>,
    free: Vec<u32>,
}

impl Pages {
    pub fn new(count: usize) -> Self {
        Pages { owners: vec![0; count], free: (0..count as u32).rev().collect() }
    }

    /// Returns the same pages and new ones after them, `count` in all.
    pub fn grown(&self, count: usize) -> Self {
        let new = self.owners.len() as u32..count as u32;
        let owners = self.owners.iter().copied().chain(new.clone().map(|_| 0)).collect();
        // Older pages are taken first.
        Pages { owners, free: new.rev().chain(self.free.iter().copied()).collect() }
    }

    /// The number of first pages that include all pages with owners.
    pub fn used(&self) -> usize {
        self.owners.iter().rposition(|owners| *owners > 0).map_or(0, |last| last + 1)
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.owners[page as usize] = 1;
        Some(page)
    }

    pub fn share(&mut self, page: u32) {
        self.owners[page as usize] += 1;
    }

    pub fn is_shared(&self, page: u32) -> bool {
        self.owners[page as usize] > 1
    }

    /// Removes one owner of a page.
    pub fn release(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        *owners -= 1;
        if *owners == 0 {
            self.free.push(page);
        }
    }
}
