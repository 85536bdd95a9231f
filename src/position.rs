#[derive(Debug)]
pub struct Rope;
impl Rope {
    pub fn check_channels(&self, _: usize) -> Result<(), crate::error::Error> {
        Ok(())
    }
    pub fn turns(&self) -> crate::kernels::turns::Turns {
        bytemuck::Zeroable::zeroed()
    }
    pub fn table(&self) -> &wgpu::Buffer {
        unimplemented!()
    }
}
