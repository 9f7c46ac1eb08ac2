//! Runs the tests of `userspace` with the kernel's offload and several workers. Needs root.

mod netns;
mod userspace;

use wg_agent::device::userspace::Options;

/// Four workers in each direction, even with fewer cores.
const OPTIONS: Options = Options {
    offload: true,
    workers: 4,
};
