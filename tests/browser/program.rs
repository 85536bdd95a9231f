//! The functions that the page calls.

use std::cell::RefCell;

use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::harness::Report;
use crate::harness::device::{full, prepare};
use crate::small::{Small, table};

#[wasm_bindgen]
extern "C" {
    /// Ends the running case as failed.
    #[wasm_bindgen(js_name = panicked)]
    fn panicked(message: &str);
}

thread_local! {
    static TABLE: RefCell<Vec<&'static Small>> = const { RefCell::new(Vec::new()) };
}

/// Makes the devices and the table of cases. Returns the f16 support and the names of all cases.
#[wasm_bindgen]
pub async fn begin() -> Result<Vec<String>, JsValue> {
    std::panic::set_hook(Box::new(|info| panicked(&info.to_string())));
    prepare().await.map_err(JsValue::from)?;
    let cases: Vec<&'static Small> =
        table(full()).into_iter().map(|case| &*Box::leak(Box::new(case))).collect();
    let names = cases.iter().map(|case| case.name.clone());
    let all =
        std::iter::once(full().gpu.device().features().contains(wgpu::Features::SHADER_F16).to_string())
            .chain(names)
            .collect();
    TABLE.with(|t| *t.borrow_mut() = cases);
    Ok(all)
}

/// Runs case `n`. Returns `passed`, `failed` or `skipped`, and the reason.
#[wasm_bindgen]
pub async fn run(n: usize) -> Vec<String> {
    let case = TABLE.with(|t| t.borrow()[n]);
    let mut report = Report::new("browser");
    case.run(&mut report).await;
    let (kind, why) = report.outcome();
    vec![kind.to_string(), why]
}
