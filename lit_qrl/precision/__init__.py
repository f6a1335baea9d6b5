"""Lightning precision plugins and the number formats behind them."""
