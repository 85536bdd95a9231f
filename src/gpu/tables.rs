//! Tables of presets.

use super::Gpu;
use crate::presets::{Table, TableData};
use crate::tensor::Error;

impl Gpu {
    /// Uploads a preset's tables to storage buffers, in their order.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn upload_tables(&self, tables: &[Table]) -> Result<Vec<wgpu::Buffer>, Error> {
        let upload = |table: &Table| match table.data() {
            TableData::Floats(data) => self.upload(data),
            TableData::Numbers(data) => self.upload(data),
            TableData::Bools(data) => self.upload_bools(data),
        };
        tables.iter().map(upload).collect()
    }
}
