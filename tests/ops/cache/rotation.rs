//! A cache that rotates keys as it appends them, each sequence at different positions. The queries
//! are rotated at the same positions.

use wgpu_attention::cache::CacheLayout;
use wgpu_attention::position::{RopeConfig, RopeOrder, RopeScaling};

use crate::harness::cached::rotation::{DIM, rotated_steps};
use crate::harness::{Report, full};

#[test]
fn appended_keys_are_rotated() {
    let mut report = Report::new("caches, rotation");
    let half = RopeConfig::new(DIM);
    let cases = [
        half,
        half.order(RopeOrder::Interleaved),
        RopeConfig::new(8).base(500.0),
        RopeConfig::new(6).order(RopeOrder::Interleaved).scaling(RopeScaling::Linear { factor: 4.0 }),
        half.scaling(RopeScaling::Yarn {
            factor: 8.0,
            original_len: 16,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        }),
    ];
    for config in cases {
        for layout in [CacheLayout::Contiguous, CacheLayout::Paged { page: 16, pages: 8 }] {
            report.record(
                &format!("{config:?}"),
                &format!("{layout:?}"),
                pollster::block_on(rotated_steps(full(), config, layout)),
            );
        }
    }
    report.finish();
}
