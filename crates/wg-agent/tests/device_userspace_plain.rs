//! Runs the tests of `userspace` without the kernel's offload, packet by packet. Needs root.

mod netns;
mod userspace;

use wg_agent::device::userspace::Options;

/// One worker in each direction.
const OPTIONS: Options = Options {
    offload: false,
    workers: 1,
};
