//! Writes every kernel variant as a `.wgsl` file, for other WGSL compilers and tools.
//!
//! `cargo run --release --features inspect --example kernels -- FOLDER`

use std::path::PathBuf;

use wgpu_attention::inspect;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).filter(|name| !name.starts_with('-'));
    let folder = PathBuf::from(folder.ok_or("usage: kernels FOLDER")?);
    std::fs::create_dir_all(&folder)?;
    for kernel in inspect::kernels() {
        let path = folder.join(format!("{}.wgsl", kernel.name.replace(' ', ",")));
        std::fs::write(&path, &kernel.wgsl)?;
        println!("{}", path.display());
    }
    Ok(())
}
