"""Address and ownership contracts: where K/V bytes live and who holds them."""
