//! Tests that need a kernel with WireGuard, on any machine: the first of them boots one in a virtual machine and has this program run
//! there whatever it was asked to run; each then says what became of it in there.

use std::{env, sync::OnceLock, time::Duration};

use clustermesh_lab::{Ended, Machine};

/// Set inside.
const IN_MACHINE: &str = "CLUSTERMESH_TEST_MACHINE";
/// Several times what all of them take, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(1800);

/// First in a test: what follows runs in the virtual machine.
macro_rules! in_the_machine {
    () => {
        fn here() {}
        if crate::machine::passed_in_machine(std::any::type_name_of_val(&here)) {
            return;
        }
    };
}
pub(crate) use in_the_machine;

/// False inside. `here`: the path of something inside the test.
pub(crate) fn passed_in_machine(here: &str) -> bool {
    static SAID: OnceLock<Result<String, String>> = OnceLock::new();
    if env::var_os(IN_MACHINE).is_some() {
        return false;
    }
    let test = here.split("::").skip(1).collect::<Vec<_>>();
    let test = test.split_last().expect("a test's path").1.join("::");
    match SAID.get_or_init(run) {
        Ok(said) if said.contains(&format!("test {test} ... ok\n")) => true,
        Ok(_) => panic!("{test} failed in the virtual machine, which says above how"),
        Err(error) => panic!("no virtual machine: {error}"),
    }
}

/// Returns what this program said in there.
fn run() -> Result<String, String> {
    let own = env::current_exe().map_err(|error| error.to_string())?;
    let words = env::args()
        .skip(1)
        .filter(|word| word != "--nocapture" && word != "--show-output");
    let command = ["env".to_owned(), format!("{IN_MACHINE}=1"), own.display().to_string()];
    let command: Vec<String> = command.into_iter().chain(words).collect();
    let machine = Machine {
        limit: LIMIT,
        ..Machine::default()
    };
    match machine.run_and_hear(&command).map_err(|error| error.to_string())? {
        (Ended::Code(_), said) => Ok(said),
        (Ended::TimeLimit, _) => Err(format!("not done in {} s", LIMIT.as_secs())),
    }
}
