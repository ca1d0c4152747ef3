# bash completion of the programs, also for zsh (autoload -U bashcompinit; bashcompinit; source it) and
# kvlm.fish. Subcommands, options and policies are what the programs themselves list, so this file knows only which options
# take which kind of value.

# __kvlm_options PROGRAM [SUBCOMMAND]: the long and short options that --help lists.
__kvlm_options() {
  "$@" --help 2>/dev/null | sed -n 's/^  \(-[^ ]*\).*/\1/p' | tr ',' '\n'
}

# __kvlm_subcommands PROGRAM: the names under "Subcommands:".
__kvlm_subcommands() {
  "$1" --help 2>/dev/null | sed -n '/^Subcommands:/,/^$/s/^  \([a-z][a-z0-9-]*\) .*/\1/p'
}

# __kvlm_policies: every part that a --kv sentence may start with.
__kvlm_policies() {
  vlm-kv list --json 2>/dev/null | tr '{' '\n' | sed -n 's/^"name":"\([^"]*\)".*/\1/p'
}

# __kvlm_facts POLICY KEY: the values of a key in what `vlm-kv list POLICY --json` prints, a line each.
__kvlm_facts() {
  vlm-kv list "$1" --json 2>/dev/null | tr '{' '\n' | sed -n "s/^\"key\":\"$2\".*/\1/p"
}

# __kvlm_spec TEXT: completes the name, the option or the value at the end of a spec: snapkv+ki, kivi,bi, uniform,evict=s.
__kvlm_spec() {
  local end=${current##*[+, ]} start part=${1##*+} key names
  start=${current%"$end"} start=${start#[\"\']}
  part=${part//[\"\' ]/}
  key=${part##*,}
  if [[ $key == visual=* || $key == text=* || ($part != *,* && $part != share=*) ]]; then
    names=$(__kvlm_policies)
  elif [[ $key == *=* ]]; then # values, of an option that has words
    names=$(__kvlm_facts "${part%%[,=]*}" "${key%%=*}\",\"legal\":\"\([^\"]*\)")
    if [[ $names == *" from "* || $names == *number* ]]; then names=''; fi
    names=${names//,/}
  else
    compopt -o nospace 2>/dev/null
    names=$(__kvlm_facts "${part%%[,=]*}" '\([^"]*\)' | sed 's/$/=/')
  fi
  __kvlm_reply < <(compgen -P "$start" -W "$names" -- "$end")
}

# __kvlm_reply: offers the lines of standard input.
__kvlm_reply() {
  local line
  while IFS= read -r line; do COMPREPLY+=("$line"); done
}

# __kvlm_words WORD...: completes the current word among these.
__kvlm_words() {
  __kvlm_reply < <(compgen -W "$*" -- "$current")
}

__kvlm_files() {
  compopt -o filenames 2>/dev/null
  __kvlm_reply < <(compgen -f -- "$current")
}

__kvlm() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
  local program=$1 subcommand='' known word at=$COMP_CWORD typed=${COMP_WORDS[COMP_CWORD]}
  # bash parts words at = and :, so that what was typed without a blank may be several of them.
  while ((at > 1)) && [[ $typed == [=:]* || ${COMP_WORDS[at - 1]} == [=:] ]]; do
    ((at -= 1))
    typed=${COMP_WORDS[at]}$typed
  done
  # An option and its value may be one word: --device=cpu arrives as --device, =, cpu.
  if [[ $current == = ]]; then current=''; fi
  if [[ $previous == = ]] && ((COMP_CWORD > 1)); then previous=${COMP_WORDS[COMP_CWORD - 2]}; fi
  COMPREPLY=()

  known=$(__kvlm_subcommands "$program")
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
    if grep -qxF -e "$word" <<<"$known"; then
      subcommand=$word
      break
    fi
  done

  if [[ ${COMP_WORDS[at - 1]} == --kv || $typed == --kv=* ]] || [[ $subcommand == explain && $typed != -* &&
    ${COMP_WORDS[at - 1]} == explain ]]; then
    __kvlm_spec "${typed#--kv=}"
    return
  fi
  case $previous in
    --request-kv) __kvlm_words any aliases ;;
    --style) __kvlm_words screen paper ;;
    --device) __kvlm_words auto cpu cuda cuda:0 ;;
    --dtype) __kvlm_words auto f32 f16 bf16 ;;
    --weights) __kvlm_words 16 int8 int4 ;;
    --activations) __kvlm_words 8 16 ;;
    --image-backend) __kvlm_words auto torchvision pil ;;
    --image-aspect) __kvlm_words auto crop pad anyres ;;
    --markdown) __kvlm_words overview options ;;
    --policy) __kvlm_words prefixkv calibquant head_quantile xquant ;;
    -m | --model)
      __kvlm_files
      __kvlm_reply < <(compgen -W "pocket pocket-llava pocket-internvl pocket-qwen" -- "$current")
      ;;
    --image | --video | --batch | --out | --data | --plot | --kv-profile | --lora | --save-weights | --media-root | --api-key-file) __kvlm_files ;;
    *)
      if [[ $current == -* ]]; then
        __kvlm_words "$(__kvlm_options "$program" ${subcommand:+"$subcommand"})"
      elif [[ $known && ! $subcommand ]]; then
        __kvlm_words "$known"
      elif [[ $subcommand == list ]]; then
        __kvlm_words "$(__kvlm_policies)"
      else
        __kvlm_files
      fi
      ;;
  esac
}

# __kvlm_whole WORD...: for shells that do not part words at = and :, completes the last of these into COMPREPLY.
__kvlm_whole() {
  local word='' parted='' i=0
  COMP_WORDS=()
  for word in "$@"; do
    parted=''
    while [[ $word == *[=:]* ]]; do
      [[ $word == [=:]* ]] || COMP_WORDS+=("${word%%[=:]*}")
      parted+=${word%%[=:]*}
      word=${word#"${word%%[=:]*}"}
      COMP_WORDS+=("${word:0:1}")
      parted+=${word:0:1}
      word=${word:1}
    done
    COMP_WORDS+=("$word")
  done
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  __kvlm "$1"
  for ((i = 0; i < ${#COMPREPLY[@]}; ++i)); do COMPREPLY[i]=$parted${COMPREPLY[i]}; done
}

complete -F __kvlm vlm-run vlm-kv vlm-bench vlm-serve
if [[ ${ZSH_VERSION-} ]]; then
  __kvlm_zsh() { __kvlm_whole "${COMP_WORDS[@]:0:$((COMP_CWORD + 1))}"; }
  complete -o nospace -F __kvlm_zsh vlm-run vlm-kv vlm-bench vlm-serve
fi
