//! Writes the path of libtorch's libraries into every binary and test of this crate, so that nobody has to set the
//! loader's search path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The libtorch that the bindings were built with: LIBTORCH, or the installed PyTorch.
    println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    let Ok(folder) = std::env::var("DEP_TCH_LIBTORCH_LIB") else {
        return;
    };
    // The loader would resolve a relative folder against the folder where the binary is started.
    let folder = std::fs::canonicalize(&folder).unwrap_or_else(|_| folder.into());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        // The linker would drop the CUDA libraries without this, because nothing refers to a symbol of theirs.
        println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
        println!("cargo:rustc-link-arg=-ltorch");
    }
}
