# Completes shardbook in zsh. In ~/.zshrc, behind compinit: eval "$(shardbook completion zsh)"
@tables@
_shardbook() {
    local word=${words[CURRENT]} given
    local -a found
    if [[ $word == *=* ]]; then
        compset -P '*='
        found=(${=$(_shardbook_values "${word%%=*}")})
    elif ((CURRENT == 2)); then
        found=(${=$(_shardbook_words "")})
    else
        found=(${=$(_shardbook_values "${words[CURRENT - 1]}")})
        ((${#found})) || found=(${=$(_shardbook_words "${words[2]}")})
    fi
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
    _files
}
compdef _shardbook shardbook
