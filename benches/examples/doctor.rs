//! `cargo run --release --example doctor [-- --quick] [> PAGE.md]`
//!
//! Prints a page of Markdown about this device, to attach to an issue. It lists the device's useful
//! features and the families of kernels that are right on it. It shows the kernels of typical
//! calls, and compares their times with the device's rates. Without an installed GPU driver, put
//! `scripts/gpu` in front to get a software driver. `--quick` omits the times of calls and the
//! rates of the device. `scripts/browser --doctor` prints the pages of a browser and of Dawn in
//! Node.

#[cfg(not(target_arch = "wasm32"))]
fn main() {
    common::doctor::print();
}

#[cfg(target_arch = "wasm32")]
fn main() {}

/// The functions that tests/browser/doctor.mjs calls.
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

    /// Prints the page of the adapter that a browser calls `device`; `driver` is the browser.
    #[wasm_bindgen]
    pub async fn doctor(device: String, driver: String, quick: bool) {
        std::panic::set_hook(Box::new(|info| panicked(&info.to_string())));
        if quick {
            be_quick();
        }
        page(&Names { device, driver }, printed).await;
    }
}
