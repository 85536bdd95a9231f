//! `cargo run --release --example doctor [-- --quick] [> PAGE.md]`
//!
//! What this device is, which of its features help, which families of kernels are right on it,
//! which kernels typical calls get, and how near those come to what the device can do: a page of
//! Markdown, to attach to an issue. Where no GPU driver is installed, `scripts/gpu` in front gets
//! one in software. `--quick` leaves out the times of calls and the rates of the device.
//! `scripts/browser --doctor` prints the pages of a browser and of Dawn in Node.

#[cfg(not(target_arch = "wasm32"))]
fn main() {
    common::doctor::print();
}

#[cfg(target_arch = "wasm32")]
fn main() {}

/// What tests/browser/doctor.mjs calls.
#[cfg(target_arch = "wasm32")]
mod program {
    use common::doctor::{Names, page};
    use common::settings::be_quick;
    use wasm_bindgen::prelude::wasm_bindgen;

    #[wasm_bindgen]
    extern "C" {
        /// Ends the program as failed.
        #[wasm_bindgen(js_name = panicked)]
        fn panicked(message: &str);
        /// The next part of the page.
        #[wasm_bindgen(js_name = printed)]
        fn printed(text: &str);
    }

    /// The page of the adapter that a browser calls `device`; `driver` is the browser.
    #[wasm_bindgen]
    pub async fn doctor(device: String, driver: String, quick: bool) {
        std::panic::set_hook(Box::new(|info| panicked(&info.to_string())));
        if quick {
            be_quick();
        }
        page(&Names { device, driver }, printed).await;
    }
}
