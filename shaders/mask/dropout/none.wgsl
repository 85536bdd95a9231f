// No dropout.
//
// Needs: nothing.
// Gives: apply_dropout.

fn apply_dropout(weight: f32, b: u32, h: u32, i: u32, j: u32) -> f32 {
    return weight;
}
