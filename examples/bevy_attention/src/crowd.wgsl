// The two kernels of the example: `features` before the attention, `steer` after it.
// The host writes AGENTS, GROUPS, HEADS and WORKGROUP in front of this text.

struct Agent {
    position: vec2f, // on a torus, each axis from -TURN / 2 to TURN / 2
    heading: vec2f,  // of length 1
}

const TURN = 6.283185307;

// A query is the agent's key, with CLOSENESS times the position and KINSHIP times the group.
// The score is CLOSENESS · (cos Δx + cos Δy), plus KINSHIP if the groups are equal. The softmax
// then weighs near agents as a Gaussian of variance 1 / CLOSENESS does.
const CLOSENESS = array<f32, HEADS>(30.0, 250.0, 60.0);
const KINSHIP = array<f32, HEADS>(6.0, 0.0, -5.0);

// The effect of each head's result on an agent, per frame.
const ALIGN = 0.12;    // head 0: turn to the mean heading of near agents of its group
const GATHER = 0.10;   // head 0: turn to their mean position
const SEPARATE = 1.2;  // head 1: turn from the mean position of the nearest agents
const AVOID = 0.5;     // head 2: turn from the mean position of near agents of other groups
const NOISE = 0.12;
const SPEED = 0.012;

@group(0) @binding(0) var<storage, read_write> agents: array<Agent>;

// Rows of eight: cos x, sin x, cos y, sin y, and one of GROUPS elements is 1.
@group(0) @binding(1) var<storage, read_write> queries: array<vec4f>; // [HEADS, AGENTS, 8]
@group(0) @binding(2) var<storage, read_write> keys: array<vec4f>;    // [AGENTS, 8]
// Rows of six: cos x, sin x, cos y, sin y, and the heading.
@group(0) @binding(3) var<storage, read_write> values: array<vec2f>;  // [AGENTS, 6]
@group(0) @binding(4) var<storage, read_write> attended: array<vec2f>; // [HEADS, AGENTS, 6]

@compute @workgroup_size(WORKGROUP)
fn features(@builtin(global_invocation_id) id: vec3u) {
    let i = id.x;
    if i >= AGENTS { return; }
    let agent = agents[i];
    let c = cos(agent.position);
    let s = sin(agent.position);
    let place = vec4f(c.x, s.x, c.y, s.y);
    let group = vec4f(vec4u(i % GROUPS) == vec4u(0, 1, 2, 3));
    keys[2 * i] = place;
    keys[2 * i + 1] = group;
    values[3 * i] = place.xy;
    values[3 * i + 1] = place.zw;
    values[3 * i + 2] = agent.heading;
    var closeness = CLOSENESS;
    var kinship = KINSHIP;
    for (var head = 0u; head < HEADS; head++) {
        let row = 2 * (head * AGENTS + i);
        queries[row] = closeness[head] * place;
        queries[row + 1] = kinship[head] * group;
    }
}

// The way from `position` to the mean position that a head returned. For far agents it is shorter.
fn way(head: u32, i: u32, position: vec2f) -> vec2f {
    let row = 3 * (head * AGENTS + i);
    let x = attended[row];
    let y = attended[row + 1];
    // sin(a - b) = sin a cos b - cos a sin b
    return vec2f(x.y, y.y) * cos(position) - vec2f(x.x, y.x) * sin(position);
}

// A number from -1 to 1 that depends on every bit of `x`.
fn noise(x: u32) -> f32 {
    var h = x * 747796405u + 2891336453u;
    h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
    h = (h >> 22u) ^ h;
    return f32(h) / 2147483648.0 - 1.0;
}

@compute @workgroup_size(WORKGROUP)
fn steer(@builtin(global_invocation_id) id: vec3u) {
    let i = id.x;
    if i >= AGENTS { return; }
    let agent = agents[i];
    let mean_heading = attended[3 * i + 2];
    let force = ALIGN * mean_heading
        + GATHER * way(0, i, agent.position)
        - SEPARATE * way(1, i, agent.position)
        - AVOID * way(2, i, agent.position);
    let turn = NOISE * noise(bitcast<u32>(agent.position.x) ^ (bitcast<u32>(agent.position.y) * 31u) ^ i);
    let side = vec2f(-agent.heading.y, agent.heading.x);
    let heading = normalize(agent.heading + force + turn * side);
    let moved = agent.position + SPEED * heading;
    agents[i] = Agent(moved - TURN * floor(moved / TURN + 0.5), heading);
}
