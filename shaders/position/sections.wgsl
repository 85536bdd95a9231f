// The axis of each pair's position: 0 is time, 1 is height, 2 is width (Wang et al. 2024,
// "Qwen2-VL").
//
// In contiguous sections, p.height and p.width are the first pairs of the axes. In interleaved
// sections they are the ends. An axis has every third pair before its end, and time has the rest.
//
// Needs: p.height, p.width, p.interleaved.
// Gives: axis_of.

fn axis_of(pair: u32) -> u32 {
    if p.interleaved == 1u {
        let axis = pair % 3u;
        return select(0u, axis, pair < select(p.height, p.width, axis == 2u));
    } else {
        return select(0u, 1u, pair >= p.height) + select(0u, 1u, pair >= p.width);
    }
}
