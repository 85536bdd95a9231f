//! The web page's program: runs all-MiniLM-L6-v2 in a browser. `scripts/web` builds it and serves
//! the page.

#[cfg(target_arch = "wasm32")]
mod program;

#[cfg(target_arch = "wasm32")]
fn main() {}

#[cfg(not(target_arch = "wasm32"))]
fn main() {
    eprintln!("This is a program for browsers: scripts/web builds it and serves the page.");
    std::process::exit(2);
}
