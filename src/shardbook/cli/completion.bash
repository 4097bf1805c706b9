# Completes shardbook in bash. In ~/.bashrc: eval "$(shardbook completion bash)"
@tables@
_shardbook() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} found="" is_value=""
    # bash takes key=value for three words
    if [[ $word == = ]]; then
        word="" is_value=1
    elif [[ $before == = ]]; then
        before=${COMP_WORDS[COMP_CWORD - 2]} is_value=1
    fi
    if ((COMP_CWORD == 1)); then
        found=$(_shardbook_words "")
    elif [[ $is_value || $before == --* ]]; then
        found=$(_shardbook_values "$before")
    fi
    [[ $found || $is_value ]] || found=$(_shardbook_words "${COMP_WORDS[1]}")
    COMPREPLY=($(compgen -W "$found" -- "$word"))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _shardbook shardbook
