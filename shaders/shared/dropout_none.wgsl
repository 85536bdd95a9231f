fn dropped(weight: f32, s: Site) -> f32 {
    return weight;
}
