//! `scripts/gpu cargo bench -p benches --bench facts`
//!
//! Lists every adapter, and all properties that wgpu reports of the benches' adapter.

use common::device;
use common::rows::{append, of_adapter};
use rows::Row;
use wgpu_attention::wgpu;

fn main() {
    let instance = device::instance();
    let adapter = device::adapter(&instance);
    let info = adapter.get_info();
    println!("adapters:");
    let all = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    for other in all {
        let other = other.get_info();
        let taken = if other == info { "  <- taken" } else { "" };
        println!(
            "  {} ({:?}, {:?}, {} {}){taken}",
            other.name, other.backend, other.device_type, other.driver, other.driver_info
        );
    }
    let products: Vec<String> = adapter
        .cooperative_matrix_properties()
        .iter()
        .map(|p| {
            let saturating = if p.saturating_accumulation { ", saturating" } else { "" };
            format!("{}x{}x{} {:?} to {:?}{saturating}", p.m_size, p.n_size, p.k_size, p.ab_type, p.cr_type)
        })
        .collect();
    let subgroups = format!("{} to {}", info.subgroup_min_size, info.subgroup_max_size);
    println!("\n{info:#?}");
    println!("\nsubgroups: {subgroups}");
    println!("cooperative matrices: {products:#?}");
    println!("\nfeatures:");
    adapter.features().iter_names().for_each(|(name, _)| println!("  {name}"));
    println!("\n{:#?}", adapter.limits());

    append(&Row {
        device_type: Some(format!("{:?}", info.device_type)),
        subgroups: Some(subgroups),
        matrices: Some(products),
        ..of_adapter(&info, "facts")
    });
    let fragments = device::open().fragments;
    println!("\na device can be had; fragments for kernels here: {fragments:?}");
}
