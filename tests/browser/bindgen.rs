//! `bindgen PROGRAM.wasm FOLDER` does the work of wasm-bindgen's command-line tool with `--target
//! web`.

fn main() {
    let [wasm, folder] = [1, 2].map(|n| std::env::args().nth(n).expect("a program and a folder"));
    let mut bindgen = wasm_bindgen_cli_support::Bindgen::new();
    bindgen.input_path(wasm).out_name("browser").typescript(false).omit_default_module_path(false);
    bindgen.web(true).and_then(|web| web.generate(folder)).expect("a program of the same wasm-bindgen");
}
