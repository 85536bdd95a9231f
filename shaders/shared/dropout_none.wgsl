fn dropped(weight: f32, q: Query, j: u32) -> f32 {
    return weight;
}
