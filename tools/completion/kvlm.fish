# fish completion of vlm-run, vlm-kv, vlm-bench and vlm-serve: what kvlm.bash offers, so it needs bash.
set -g __kvlm_bash (path filter (status dirname)/kvlm.bash (status dirname)/../../bash-completion/completions/vlm-run)[1]

function __kvlm_fish
    bash -c 'source "$0" && __kvlm_whole "$@"
        for word in "${COMPREPLY[@]}"; do
            [[ -d $word ]] && word+=/
            printf "%s\\n" "$word"
        done' $__kvlm_bash (commandline -opc) (commandline -ct)
end

complete -c vlm-run -c vlm-kv -c vlm-bench -c vlm-serve -f -a '(__kvlm_fish)'
