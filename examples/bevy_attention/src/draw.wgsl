// Draws each agent as a triangle, directly from the buffer that the kernels write.
// The host writes GROUPS in front of this text.

struct Agent {
    position: vec2f,
    heading: vec2f,
}

const TURN = 6.283185307;
const LENGTH = 0.011;

@group(0) @binding(0) var<storage, read> agents: array<Agent>;

struct Corner {
    @builtin(position) position: vec4f,
    @location(0) colour: vec3f,
}

@vertex
fn corner(@builtin(vertex_index) vertex: u32, @builtin(instance_index) i: u32) -> Corner {
    let agent = agents[i];
    let side = vec2f(-agent.heading.y, agent.heading.x);
    var corners = array(agent.heading, 0.45 * side - 0.8 * agent.heading, -0.45 * side - 0.8 * agent.heading);
    let centre = 2.0 * agent.position / TURN;
    // The colour is the group's. It is bright for agents that move up, dark for the others.
    var colours = array(vec3f(0.9, 0.22, 0.05), vec3f(0.06, 0.35, 0.9), vec3f(0.1, 0.65, 0.12), vec3f(0.85, 0.6, 0.04));
    let light = 0.65 + 0.35 * agent.heading.y;
    return Corner(vec4f(centre + LENGTH * corners[vertex], 0.0, 1.0), light * colours[i % GROUPS]);
}

@fragment
fn fill(corner: Corner) -> @location(0) vec4f {
    return vec4f(corner.colour, 1.0);
}
